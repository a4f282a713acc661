"""fluke's side of `lab_speed.py`, run in an environment of its own: a round for each line on standard input.

    ENV/bin/python -m benchmarks.lab.lab_speed_fluke fedavg SHARES.npz '[lr, momentum, mean, std, epochs, batch]'

After each round it prints `round PROCESSOR_S WALL_S`. fluke's own classes, as its documentation shows them; no client
is evaluated, and its progress display goes nowhere.
"""

from __future__ import annotations

import copy
import json
import sys
import time

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedproto import FedProto
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.nets import MNIST_CNN_E, EncoderHeadNet


def main() -> None:
    """Make the federation, then run a round whenever asked."""
    name, path, numbers = sys.argv[1:]
    lr, momentum, mean, std, epochs, batch = json.loads(numbers)
    shares = np.load(path)
    clients, samples = shares["y"].shape
    x = torch.from_numpy((shares["x"].astype(np.float32) / 255 - mean) / std).reshape(-1, 1, 28, 28)
    y = torch.from_numpy(shares["y"]).reshape(-1)
    torch.set_num_threads(1)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_evaluator(ClassificationEval(eval_every=10**6, n_classes=10))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    splitter = DataSplitter(
        DataContainer(x, y, x[:clients], y[:clients], 10), "iid"
    )  # a test set that nobody is asked about
    client = DDict(
        batch_size=batch,
        local_epochs=epochs,
        loss=torch.nn.CrossEntropyLoss,
        optimizer=DDict(name="SGD", lr=lr, momentum=momentum),
        scheduler=DDict(name="StepLR", step_size=10**6, gamma=1.0),
    )
    server = DDict(weighted=True)
    net = EncoderHeadNet(MNIST_CNN_E(), torch.nn.Linear(1024, 10))
    if name == "fedproto":
        client.update(n_protos=10, lam=1.0, model=net)
        server.update(n_protos=10)
    given = DDict(client=client, server=server, model=net)
    federation = {"fedavg": FedAVG, "fedproto": FedProto}[name](clients, splitter, given)
    if name == "fedproto":
        for each in federation.clients:
            each.model = copy.deepcopy(net)
    assert sum(len(each.train_set) for each in federation.clients) == clients * -(-samples // batch)
    for _ in sys.stdin:
        began, before = time.perf_counter(), time.process_time()
        federation.run(1, 1.0, finalize=False)
        print("round", time.process_time() - before, time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
