"""What clients call that is not served here: each call, as they send it, is refused, and none is taken for another."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.score_methods import METHODS

pytestmark = pytest.mark.real

CALLS: dict[str, tuple[tuple[str, Any], ...]] = {
    "trl-VLLMClient.image_features": (("/image_features/", {"images": ["aGk="]}),),
    "trl-VLLMClient.init_communicator,-update_named_param,-update_model_params,-reset_prefix_cache": (
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2, "client_device_uuid": "0"}),
        ("/update_named_param/", {"name": "w", "dtype": "torch.float32", "shape": [1]}),
        ("/reset_prefix_cache/", {}),
        ("/reset_prefix_cache", {}),
    ),
    "prime-rl-update_weights,-load_lora_adapter,-init_nccl_broadcast": (
        ("/update_weights", {"weight_dir": "/weights/step-1"}),
        ("/load_lora_adapter", {"lora_name": "step-1", "lora_path": "/weights/step-1"}),
        ("/init_broadcaster", {"host": "0.0.0.0", "port": 29500}),
    ),
}
"""By the name of the row: paths and bodies."""


@pytest.mark.parametrize("name", [method.name for method in METHODS if not method.path])
def test_a_path_that_is_not_served_is_not_found(http: httpx.Client, name: str) -> None:
    for path, body in CALLS[name]:
        for prefix in ("", "/services/judge"):
            answer = http.post(prefix + path, json=body)
            assert answer.status_code == 404, (path, answer.text)


@pytest.mark.parametrize("path", ["/list_datasets", "/list_ids", "/get_prompts", "/get_prompt_by_id", "/submit", "/get_metrics"])
def test_data_sets_of_sandbox_fusion_are_not_found(http: httpx.Client, path: str) -> None:
    assert http.post(path, json={"dataset": "any", "config": {}}).status_code == 404
