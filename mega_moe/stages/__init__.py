"""The rungs of the ladder, one recipe a file: which kernel does each of the five steps, forward and backward.

Read them in order: the difference between two neighbours is what the upper one has learnt. Every recipe has
`forward(problem, inputs) -> (y, Saved)`, `backward(problem, inputs, saved, dy, need) -> Grads`, `why_not(problem)` (one
sentence, with the fix, if the rung cannot run) and `note(problem)` (what runs slower than it should).

Saved holds pre where problem.save is "pre". Where it is "inputs" forward drops pre as soon as act is made, and backward
makes it again by the same step, with the same bits.
"""
