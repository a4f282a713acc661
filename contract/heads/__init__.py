"""From sums to answers.

- `ridge` solves FFC's closed form, with the eigenvalues of `spectrum`.
- `covariance` and `discriminant` make heads from class means.
- `sphere` places the classes on the unit sphere.
- `answers` turns features into scores of classes.
"""
