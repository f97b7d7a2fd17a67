"""What a layout costs in memory, traffic and time, before it runs. No torch.

    cluster, catalogue   what there is: devices, links, stacks, prices, each number with its source
    constants            what was measured or fitted, in one table
    compute, links, ...  closed forms over arrays of layouts
    price                one plan: the closed forms, and the folds of its program
"""
