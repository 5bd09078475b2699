"""Names of models that come as packages, without a download."""

BUILT_IN = "smollm2-135m"
BUILT_IN_ENCODER = "all-minilm-l6-v2"
