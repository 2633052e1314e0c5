"""Check a node: whether a layer over ranks is right there, survives a thousand calls, and how fast it is.

    torchrun --nproc-per-node=8 -m mega_moe.ranks_check --json node.json

A process a rank, each with a GPU of its own; without GPUs the ranks share memory of the host, and Triton's interpreter
runs a tiny layer. docs/running.md says what is checked, and what to do when something fails.

    __main__.py    the command line, and the order of the parts
    where.py       GPUs, links, and whether heaps can be made
    parts.py       one part after another: each ends, whatever happens, and all ranks know how
    layers.py      a layer that ranks share, and what one process makes of it
    right.py       parity, a thousand calls, a captured graph, two groups at once
    times.py       rows of a table, measured in turns; a trace; what was predicted
    unfused.py     the layer in plain torch, over all_to_all: what people run today
"""
