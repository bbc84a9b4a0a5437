import toy_series

PATCH = toy_series.make("toy-gate", toy_series.gate_edits, ["Builder.gate", "Base.inherited"])
