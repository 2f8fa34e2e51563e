"""Token trees, and the shapes, settings and policies that are fixed before they grow. It knows no model.

A `TokenTree` is flat tensors: tokens, parents, ranks. Node 0 is the root, and parents come before children.
`settings.py` has `TreeSettings`, which are checked when they are made: a setting that the policy does not use is
refused.

A policy is one record in `policies.py`: its draws, the settings that mean something to it, whether its shape is dynamic
or static, its budget and defaults. Settings, growth, tuning and the command line read it. docs/extending.md says how to
add one.
"""
