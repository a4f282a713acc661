"""One federation in one process: train, merge, evaluate, and checkpoint between rounds.

`experiment` is `lab run`. Methods run on the deployed cores: `deployed` joins device and aggregator, `device_turns` is
a device's turn, `torch_trainer` trains where that is faster. What averages weights is `run_averaging` over
`weight_averaging`, with `client_training` for a client's side. `evaluation`, `personal_evaluation`, `device_accuracy`
and `tally` measure; `frozen_heads` compares heads over frozen features; `checkpoint` keeps a run; `worker_preload` is
what each worker process loads first.
"""
