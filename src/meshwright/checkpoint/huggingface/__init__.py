"""Published checkpoints: folders of config.json and safetensors files, in and out."""
