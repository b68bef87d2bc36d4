"""Planning: pure functions from (model, shape, group, wish) to a ``DecodePlan``. No torch, no Ray, no HTTP."""
