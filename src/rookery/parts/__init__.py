"""Building blocks that two or more algorithms share.

Import the functions from their modules, for example `from rookery.parts.local import sgd`:

- `local`: local steps of one client along a gradient, by `sgd`, `svrg` or an optimizer (`descend`).
- `fields`: `descend`, simultaneous local steps on several variables, plain or corrected by an anchor.
- `single_loop`: `directions` of x, y and z ≈ [∇²_y g]⁻¹∇_y f for methods that move all three at once.
- `momentum`: `moving_average` and `storm`.
- `inverse_hessian`: `solve`, products with an inverse Hessian, on one client or over the federation.
- `hypergradient`: a client's part of the hypergradient, `given_vector` or `local_at`.
- `features`: `seen`, the features of all lower data, computed once per round.
- `compositional`: the `slope` of the outer function and the `first_value` of the inner one.
- `projection`: onto a `ball`, a `simplex` or a `capped_simplex`.
- `output`: `one_of`, a random iterate as the result.
"""
