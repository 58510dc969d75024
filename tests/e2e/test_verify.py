"""`meshwright verify` as people use it: presets, Hugging Face folders, modules of their own, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.models.hf_config import config_from_spec
from meshwright.models.presets import preset
from tests.conftest import CommandLine

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """The module of docs/strategies.md, as a file in the current folder."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "strategies.md").read_text(), re.DOTALL)
    (source,) = [code for code in blocks if "class Net" in code]
    (tmp_path / "net.py").write_text(source)
    return tmp_path / "net.py"


def test_preset_is_equal_and_told_in_words(meshwright: CommandLine) -> None:
    result = meshwright("verify", "--model", "Llama3.1-8B", "--parallel", "zero=1 tp=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Llama3.1-8B as" in result.stdout
    assert "heads 16/4" in result.stdout
    assert "dp is left open and taken as 2" in result.stdout
    assert "weights that differ most" in result.stdout
    assert "equal: the strategy computes what one device computes; losses, gradient norms and weights" in result.stdout
    assert "dp=2 zero=1 tp=2: 2 steps on 4 processes" in result.stderr


@pytest.mark.slow
def test_folder_is_equal_and_told_as_json(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text(json.dumps(config_from_spec(preset("qwen2.5-0.5b"))))
    result = meshwright("verify", "--model", "folder", "--parallel", "dp=64 zero=3 tp=2", "--steps", 2, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    proof = json.loads(result.stdout)
    assert proof["equal"] is True
    assert (proof["asked"], proof["ranks"]) == ("dp=64 zero=3 tp=2", 4)
    assert proof["strategy"] == "dp=2 zero=3 tp=2 wrap=block"
    assert proof["notes"] == ["dp=64 is proved as dp=2", "wrap=auto is proved as wrap=block"]
    assert proof["shape"]["tie_word_embeddings"] is True
    assert proof["shape"]["bias"] == ["q", "k", "v"]
    assert [step["step"] for step in proof["steps"]] == [1, 2]
    assert set(proof["steps"][0]["loss"]) == {"strategy", "one_device", "difference"}
    assert proof["steps"][1]["grad_norm"]["difference"] < 1e-9
    assert len(proof["parameters"]) == 5
    assert proof["parameters"][0]["difference"] < 1e-9
    assert proof["first_difference"] is proof["failure"] is None
    assert (proof["precision"], proof["bound"]) == ("float64", 1e-9)


def test_module_of_ones_own_is_equal(meshwright: CommandLine, net: Path) -> None:
    result = meshwright("verify", "--model", "net:Net", "--parallel", "dp=2 zero=2 tp=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "net:Net:" in result.stdout


@pytest.mark.parametrize("strategy", ["pp=3", "tp=2 pp=2 sp=off layers=2+1"])
def test_module_of_ones_own_is_equal_in_stages(meshwright: CommandLine, net: Path, strategy: str) -> None:
    result = meshwright("verify", "--model", "net:Net", "--parallel", strategy, "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr


def test_stages_with_whole_sequences_between_them_want_sp_off(meshwright: CommandLine, net: Path) -> None:
    result = meshwright("verify", "--model", "net:Net", "--parallel", "tp=2 pp=2")
    assert result.returncode == 2
    assert "between the stages of Net there are whole sequences; use sp=off" in result.stderr


TRANSFORMERS = """
from transformers import AutoConfig, AutoModelForCausalLM


def build():
    config = AutoConfig.for_model(
        "gemma2", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=66, pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
"""


def test_model_of_transformers_is_equal_in_stages(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "gemma.py").write_text(TRANSFORMERS)
    result = meshwright("verify", "--model", "gemma:build", "--parallel", "pp=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr


MLP = """
import torch
from torch import nn


class Mlp(nn.Module):
    pipeline_plan = ("layers.*", "head")

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 12), (12, 20), (20, 8), (8, 10)))
        self.act = nn.Tanh()
        self.head = nn.Linear(10, 1)

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


def inputs(seed, samples):
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 6, generator=draw), "y": torch.randn(samples, 1, generator=draw)}


def loss(model, inputs):
    return nn.functional.mse_loss(model(inputs["x"]), inputs["y"])
"""


def test_loss_of_ones_own_is_equal_in_stages_and_a_mistake_is_found(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(MLP)
    result = meshwright("verify", "--model", "mlp:Mlp", "--parallel", "pp=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    wrong = "x = self.act(layer(x)) * (1 + torch.distributed.is_initialized() * (layer is self.layers[2]))"
    (tmp_path / "mlp.py").write_text(MLP.replace("x = self.act(layer(x))", wrong))
    result = meshwright("verify", "--model", "mlp:Mlp", "--parallel", "pp=2", "--steps", 2)
    assert result.returncode == 1
    assert "the output of layers.3 is the first that departs, in step 1, on rank 1" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cp=2", "dp=2 cp=2 zero=3", "pp=2 cp=2 schedule=zbv"])
def test_decoder_that_a_function_builds_is_equal(meshwright: CommandLine, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "dec.py").write_text(
        "from meshwright.models.initialize import build as decoder\n"
        "from meshwright.models.presets import preset\n"
        "def build():\n"
        "    return decoder(preset('tiny').model_copy(update={'tie_word_embeddings': True, 'num_hidden_layers': 4}))\n"
    )
    result = meshwright("verify", "--model", "dec:build", "--parallel", strategy, "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_a_foreign_module_cannot_take_is_refused_first(meshwright: CommandLine, net: Path) -> None:
    net.write_text(net.read_text().replace("pipeline_plan = ", "unknown = "))
    result = meshwright("verify", "--model", "net:Net", "--parallel", "pp=2")
    assert result.returncode == 2
    assert "pp needs to know in which order Net calls its parts" in result.stderr
    assert "one device" not in result.stderr


@pytest.mark.slow
def test_wrong_table_is_not_equal_and_the_module_is_named(meshwright: CommandLine, net: Path) -> None:
    # Every rank computes all of it, and the region adds up what they have.
    wrong = net.read_text().replace('"blocks.*.mlp.up": "column"', '"blocks.*.mlp.up": "shared"')
    net.write_text(wrong.replace('"blocks.*.mlp.down": "row"', '"blocks.*.mlp.down": "shared"'))
    result = meshwright("verify", "--model", "net:Net", "--parallel", "dp=1 tp=2", "--steps", 2)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "not equal: the output of blocks.0.mlp is the first that departs" in result.stdout
    assert "2 times what it should be" in result.stdout


@pytest.mark.slow
def test_rule_of_another_place_is_named_by_its_parameter(meshwright: CommandLine, net: Path) -> None:
    net.write_text(net.read_text().replace('"blocks.*.norm_?": "tokens"', '"blocks.*.norm_?": "shared"'))
    result = meshwright("verify", "--model", "net:Net", "--parallel", "dp=1 tp=2 sp=off", "--steps", 1)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "the gradient of blocks.2.norm_2.bias departs, in step 1, on rank 0, 2 times what it should" in result.stdout
    assert "The table says shared" in result.stdout


@pytest.mark.slow
def test_module_that_cannot_be_cut_so_fails_under_the_strategy(meshwright: CommandLine, net: Path) -> None:
    net.write_text(net.read_text().replace('"blocks.*.mlp.down": "row"', '"blocks.*.mlp.down": "shared"'))
    result = meshwright("verify", "--model", "net:Net", "--parallel", "dp=1 tp=2", "--steps", 2)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "not equal: the strategy fails where one device works" in result.stdout
    assert "shapes cannot be multiplied" in result.stdout


def regression(path: Path, layer: str) -> None:
    """The module of docs/verify.md, with one more layer."""
    (source,) = re.findall(r"```python\n(.*?)```", (DOCS / "verify.md").read_text(), re.DOTALL)
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.replace("nn.Tanh()", f"{layer}, nn.Tanh()"))


@pytest.mark.slow
def test_inputs_and_loss_of_ones_own(meshwright: CommandLine, tmp_path: Path) -> None:
    regression(tmp_path / "package/regression.py", "nn.Dropout(0.5)")
    result = meshwright("verify", "--model", "package.regression:build", "--parallel", "dp=2", "--precision", "float32")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses and gradient norms agree to 0.0001 in float32" in result.stdout


@pytest.mark.slow
def test_layer_that_looks_at_the_whole_batch_is_found(meshwright: CommandLine, tmp_path: Path) -> None:
    regression(tmp_path / "regression.py", "Centred()")
    path = tmp_path / "regression.py"
    layer = "class Centred(nn.Module):\n    def forward(self, x):\n        return x - x.mean(0)\n"
    path.write_text(path.read_text() + layer)
    result = meshwright("verify", "--model", "regression:build", "--parallel", "dp=2", "--steps", 1, "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    difference = json.loads(result.stdout)["first_difference"]
    assert (difference["kind"], difference["name"], difference["after"]) == ("output", "1", "0")


@pytest.mark.parametrize(
    ("model", "strategy", "expected"),
    [
        ("tinny", "dp=2", "is no preset (did you mean 'tiny'?), no folder here and no MODULE:FUNCTION"),
        ("no/where", "dp=2", "there is no such folder; give one that holds a config.json"),
        ("deepseek-v3", "dp=2", "latent attention"),
        ("tiny", "dp=2 tpp=2", "unknown key 'tpp' (did you mean 'tp'?)"),
        ("tiny", "dp=1 tp=3", "tp=3 cannot deal out 8 attention heads and 4 key-value heads; tp can be 1, 2, 4, 8"),
        ("tiny", "dp=2 offload=parameters", "use zero=3 on more processes"),
        ("a b:build", "dp=2", "is not MODULE:FUNCTION"),
        ("nowhere:build", "dp=2", "there is no module 'nowhere' here; start where nowhere.py lies, or install it"),
        ("mine:missing", "dp=2", "mine has no function 'missing'; define one without arguments"),
        ("mine:number", "dp=2", "mine:number gives int, not an nn.Module; return the model"),
        ("mine:needy", "dp=2", "cannot be called without arguments"),
        (
            "mine:plain",
            "dp=2",
            "mine:plain has no nn.Embedding and so is no language model; define inputs(seed, samples)",
        ),
        ("mine:plain", "dp=1 tp=2", "give the class a `tensor_plan`"),
        ("half:build", "dp=2", "half defines inputs and not loss(model, inputs); define both"),
        ("rows:build", "dp=2", "gives '0' with shape (3, 2); its first dimension must be the 8 samples"),
        ("imports:build", "dp=2", "'imports' imports nothing_such, which is not installed here"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    strategy: str,
    expected: str,
) -> None:
    start = "import torch\nfrom torch import nn\n"
    functions = "number = lambda: 3\ndef needy(x): ...\ndef plain(): return nn.Linear(2, 2)\n"
    (tmp_path / "mine.py").write_text(start + functions)
    inputs = "def build(): return nn.Linear(2, 2)\ndef inputs(seed, samples): return (torch.zeros(3, 2),)\n"
    (tmp_path / "half.py").write_text(start + inputs)
    (tmp_path / "rows.py").write_text(start + inputs + "def loss(model, inputs): return model(*inputs).mean()\n")
    (tmp_path / "imports.py").write_text("import nothing_such\n")
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--model", model, "--parallel", strategy]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.splitlines()[-1].startswith("meshwright verify: ")
    assert expected in message


@pytest.mark.slow
def test_module_that_cannot_be_built_is_told_with_its_file_and_line(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(): raise RuntimeError('no weights here')\n")
    result = meshwright("verify", "--model", "broken:build", "--parallel", "dp=2")
    assert result.returncode == 2
    assert "broken:build fails: RuntimeError: no weights here" in result.stderr
    assert "broken.py, line 1)" in result.stderr


def test_nothing_to_compare_is_refused(meshwright: CommandLine) -> None:
    result = meshwright("verify", "--model", "tiny", "--parallel", "dp=2", "--steps", 0)
    assert result.returncode == 2
    assert "--steps=0 compares nothing" in result.stderr
