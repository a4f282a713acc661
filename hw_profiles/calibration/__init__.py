"""One board, five minutes: small graphs that it runs, and what they say of every network there.

    design, graph_bytes                    sizes that fill what networks have; graphs as bytes, without the onnx package
    inference_suite, training_suite        the graphs
    amounts, suite                         what a graph asks of a runtime; all graphs with that
    fit, fit_board                         what one unit of each amount costs on a board; how wrong that is
    predict_board                          a workload on a board that has such a file

`protofleet/commands/calibrate.py` runs the graphs; `devices.calibrated` is the file's form. Decision 266 says why.
"""
