"""Configurations of other trainers, both ways.

dialect     what one format can say, and what its words mean that ours do not: one file each
convert     reads, writes, reads back what it wrote, and tells what was lost; refuses what changes a layout
"""
