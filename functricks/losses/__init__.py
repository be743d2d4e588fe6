r"""Losses: tensors in, a :class:`functricks.Loss` out.

A loss returns the value of every element and the weight that each carries in the mean. There is no ``reduction=``:
``.mean()``, ``.sum()`` and ``.values`` are PyTorch's three, and because the weights stay beside the values, the parts
of a batch (micro-batches, left-over batches, ranks) add up to the whole: sum the numerators, sum the weights, divide
once.

What holds for all of them:

- **Hyper-parameters** (``label_smoothing``, ``temperature``, ``gamma``, ``alpha``, class weights, ``pos_weight``) may
  be tensors: batched by ``vmap``, differentiated through. A tensor is never branched on; a Python number is checked.
- **Ignored elements** are taken out *before* anything is computed from them, so that a NaN in them reaches neither the
  value nor a gradient, and deleting them changes nothing.
- **Half precision** is computed in float32; ``values`` return in the dtype of the input, ``weights`` stay float32. A
  value beyond the range of float16 becomes its largest number, and keeps its gradient. Under ``torch.autocast`` values
  stay float32, as PyTorch's do.
- **Errors.** Shapes and dtypes are checked always. Values (a class index out of range, probabilities where logits
  belong) are checked only in plain eager calls on the CPU: never inside ``torch.func``, ``torch.compile`` or a
  fake-tensor trace, and never where the check would wait for an accelerator.

The class axis is axis 1, or axis 0 of a single unbatched example, as in PyTorch.
"""

from functricks.losses._binary import binary_cross_entropy, binary_cross_entropy_with_logits, sigmoid_focal_loss
from functricks.losses._classes import cross_entropy, focal_loss, log_softmax, nll_loss, softmax
from functricks.losses._contrastive import info_nce, ntxent, supervised_contrastive
from functricks.losses._elementwise import kl_divergence, l1_loss, mse_loss

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "focal_loss",
    "info_nce",
    "kl_divergence",
    "l1_loss",
    "log_softmax",
    "mse_loss",
    "nll_loss",
    "ntxent",
    "sigmoid_focal_loss",
    "softmax",
    "supervised_contrastive",
]
