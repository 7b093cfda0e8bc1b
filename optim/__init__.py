"""Update rules and codecs: functions and optimizers on tensors, without network or processes."""
