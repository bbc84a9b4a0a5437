import toy_series

PATCH = toy_series.make("toy-build", toy_series.build_edits, ["Builder.build", "plan"])
