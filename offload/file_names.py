"""The names of the files that model folders and adapters have, for code that has no time to load torch."""

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
