"""LoRDO: optimizers whose state lives in a low-rank subspace that all nodes share.

:mod:`~optim.lordo.inner` is the local optimizer, :mod:`~optim.lordo.optimizer` the whole as one
``torch.optim.Optimizer``, :mod:`~optim.lordo.low_rank_ddp` the baseline with an exchange in every step, and
:mod:`~optim.lordo.reference` what both are tested against.
"""
