"""Predicts the time of a workload on a board, learned from published rows.

`published_rows` reads them; `operator_classes` says what of a workload a row is fitted by; `fit` and `hierarchical_fit`
fit, `cross_validation` says how well; `datasheet` has the rates of a board that nobody measured, in each of
the `precisions`; `intervals` says how wide an interval is by what was left out, `support` whether a figure has ground;
`predict` predicts.
"""
