"""Each technique twice: as a careful practitioner writes it in classic PyTorch, and with functricks.

A module of this package holds one technique or family, with ``classic()`` and ``functional()`` side by side and a list
``TECHNIQUES`` of what to compare. ``python -m parity`` trains both versions of all of them and compares the numbers,
``python -m parity.speed`` times both, ``python -m parity.matrix`` runs every technique in lanes, compiled,
differentiated and in a classic loop, ``python -m parity.faults`` prints what the usual recipes get wrong.
"""
