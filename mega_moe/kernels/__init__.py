"""The Triton kernels, one file per kernel family, and the only place where Triton is imported.

tile.py holds the tile maths that kernels share, blocks.py their block sizes for each kind of GPU, weights.py the rule
by which weights are read where they lie.
"""
