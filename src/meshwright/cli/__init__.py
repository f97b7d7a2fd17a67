"""The command line: parsing and printing. Commands import what they need when they run, never before."""
