"""What the usual recipes do wrong, in numbers: ``python -m parity.faults``.

Each fault is a few lines of the usual recipe and the same thing with functricks, on a case small enough to check by
hand.
"""
