"""The code of the documents that this project was founded on runs, as far as they are at hand.

Only the provider is exchanged for `Local()`, and what would be downloaded for packaged data and a small model that is
made here. Each block runs as a program of its own, for classes that are defined in one have to travel by value.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOLDER = next((p / "shared/seeds" for p in ROOT.parents if (p / "shared/seeds").is_dir()), None)

RUN = """
import ast, asyncio, inspect, sys
import __main__
source = open(sys.argv[1]).read()
code = compile(source, sys.argv[1], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
made = eval(code, vars(__main__))
if inspect.iscoroutine(made):
    asyncio.run(made)
"""

# Digits in the place of MNIST: the same shapes, and nothing to download. They are normalized already: the stand-ins of
# torchvision's transforms do nothing.
DATA = """
class transforms:
    Compose = ToTensor = Normalize = staticmethod(lambda *arguments: None)
class Digits:
    def __init__(self, folder, train=True, download=True, transform=None):
        import torch
        from sklearn.datasets import load_digits
        images = torch.tensor(load_digits().images, dtype=torch.float32)
        images = torch.nn.functional.interpolate(images[:, None] * 255 / 16, size=28, mode="bilinear")[:, 0]
        rows = slice(0, 1000) if train else slice(1000, 1400)
        self.data, self.targets = images.round().to(torch.uint8)[rows], torch.tensor(load_digits().target)[rows]
    def __len__(self):
        return len(self.data)
    def __getitem__(self, row):
        return self.data[row][None].float() / 255, int(self.targets[row])
"""

# A small language model with a tokenizer and a chat template, in the place of one from the Hub.
MODEL = """
import sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *alphabet])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}assistant:"
fast.save_pretrained(sys.argv[2])
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, eos_token_id=1, pad_token_id=0,
)
Qwen2ForCausalLM(config).save_pretrained(sys.argv[2])
"""

EXCHANGED = [
    (r"import skyward as sky", "import skyproxy as sky"),
    (r"from skytorch\.client", "from skyproxy.client"),
    (r"sky\.(AWS|Container)\(\)", 'sky.Local(device="cpu")'),
    (r"datasets\.MNIST\(", "Digits("),
    (r"from torchvision import datasets, transforms\n", "\n"),
    # The container image of another project. Where a block names no provider, SKYPROXY_PROVIDER does.
    (r'image="ghcr\.io/[^"]*"', 'provider=__import__("skyproxy").Local(device="cpu")'),
    # The machine that runs the tests has no GPU.
    (r"\.cuda\(\)", ""),
    (r'(\.to|node\.device|_device = \w+\.device|trainer\.device|vllm\.device)\("cuda"\)', r'\1("cpu")'),
    (r'"path": "/cache"', '"path": "CACHE"'),
    (r'"HF_HOME": "/cache"', '"HF_HOME": "CACHE"'),
    (r'"Qwen/[^"]*"', '"MODEL"'),
    (r'token="hf_xxx"', "token=None"),
]
# What a program that starts anew finds: another test module may have imported torchvision from a folder of its own.
if PathFinder.find_spec("torchaudio") is None:
    EXCHANGED.append((r', audio="latest"', ""))
if PathFinder.find_spec("torchvision") is None:
    EXCHANGED.append((r'vision="latest"(, )?', ""))


@dataclass
class Block:
    """Code of a document, and what is needed around it.

    Attributes:
        name: for the test.
        code: as it stands there.
        before: what the document presupposes: names from blocks above, or functions that it only mentions.
        after: what shows that it works.
        expected: what must be printed.
        exempt: why it cannot be run.
        slow: whether it takes more than a few seconds.
    """

    name: str
    code: str
    before: str = ""
    after: str = ""
    expected: list[str] = field(default_factory=list)
    exempt: str = ""
    slow: bool = False


def fenced(number: str) -> list[str]:
    assert FOLDER is not None
    (path,) = FOLDER.glob(f"{number}_*.txt")
    return [match[1] for match in FENCE.finditer(path.read_text(encoding="utf-8"))]


def unfenced(number: str) -> list[str]:
    """Code of a page that was saved as plain text: lines that begin one, with the indented lines below."""
    assert FOLDER is not None
    (path,) = FOLDER.glob(f"{number}_*.txt")
    blocks: list[list[str]] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        begins = re.match(r"(class \w+\(|def \w+\(|@\w|if __name__|[A-Z_]+ = |image=)", line)
        goes_on = line.startswith((" ", "\t", ")")) or not line.strip()
        if begins and not (inside and blocks[-1][-1].startswith("@")):
            blocks.append([line])
            inside = True
        elif inside and (goes_on or begins):
            blocks[-1].append(line)
        else:
            inside = False
    return ["\n".join(block).strip("\n") + "\n" for block in blocks]


def documents() -> list[Block]:
    """Every block of the five documents."""
    if FOLDER is None:
        return []
    mnist, llm, grpo = fenced("000")
    ddp, vision, pinned, cpu_only, combined = fenced("001")
    # `train` of the first block, without the pool that runs it.
    train = ddp[: ddp.index("with sky.ComputePool")]
    finetune = "@sky.compute\ndef finetune():\n    import torch.distributed as dist\n    return dist.get_world_size()\n"
    concept, keras, shard, runtime, output, order = fenced("003")
    made = [
        Block("000-mnist", mnist, before=DATA, after="print('trained')", expected=["trained"], slow=True),
        Block("000-llm", llm, expected=["Prompt: What is machine", "Response:"], slow=True),
        Block(
            "000-grpo",
            grpo,
            after=(
                "    import torch\n"
                "    assert trainer_device != vllm_device\n"
                "    for p, ref_p in zip(model.parameters(), ref_model.parameters()):\n"
                "        assert (p.device, ref_p.device) == (trainer_device, vllm_device)\n"
                "        assert torch.equal(p.cpu(), ref_p.cpu())\n"
                "        p.data.add_(1)\n"
                "        assert not torch.equal(p.cpu(), ref_p.cpu())\n"
                "        ref_p.data.copy_(p.data)\n"
                "        assert torch.equal(p.cpu(), ref_p.cpu())\n"
                "    print('synced')\n"
            ),
            expected=["synced"],
        ),
        Block("001-ddp", ddp, expected=["Epoch 9: loss=", "Rank 0: loss=", "Rank 3: loss="]),
        Block("001-vision", vision, before=train, after="print(len(results))", expected=["Epoch 9", "2"], slow=True),
        Block(
            "001-pinned",
            pinned,
            before="import skyproxy as sky\n",
            after="print(plugins[0].requirements())",
            expected=["['torch==2.3.0', 'torchvision==0.18.0']"],
        ),
        Block("001-cpu", cpu_only, before=train, after="print(len(results))", expected=["Epoch 9", "4"], slow=True),
        Block(
            "001-huggingface",
            combined,
            before="import skyproxy as sky\n" + finetune,
            after="print(results)",
            expected=["[2, 2]"],
            slow=True,
        ),
        *(
            Block(f"002-{position}", code, exempt="it includes lines of a file that is not part of the document")
            for position, code in enumerate(fenced("002"))
            if "--8<--" in code
        ),
        Block(
            "003-concept",
            concept.replace("    ...", "    return dist.is_initialized()"),
            before="import skyproxy as sky\n",
            after="print(results)",
            expected=["[True, True, True, True]"],
            slow=True,
        ),
        Block("003-keras", keras, before="import skyproxy as sky\n", after="print(len(plugins))", expected=["2"]),
        Block(
            "003-shard",
            shard,
            before="import skyproxy as sky\ndef fit(x, y):\n    return [a == -b for a, b in zip(x, y)], len(x)\n",
            after=(
                "with sky.Compute(provider=sky.AWS(), nodes=2) as pool:\n"
                "    rows = list(range(10))\n"
                "    print(train(rows, [-row for row in rows]) @ pool)\n"
            ),
            expected=[f"[{([True] * 5, 5)}, {([True] * 5, 5)}]"],
        ),
        Block(
            "003-runtime",
            runtime,
            before=(
                "import skyproxy as sky\ndef coordinate_others(): print('head')\ndef process(data): return data * 2\n"
            ),
            after=("with sky.Compute(provider=sky.AWS(), nodes=2) as pool:\n    print(distributed_task(4) @ pool)\n"),
            expected=["Node 0 of 2", "Node 1 of 2", "head", "[8, 8]"],
        ),
        Block(
            "003-output",
            output,
            before="import skyproxy as sky\nepoch, loss = 3, 0.5\n",
            after="with sky.Compute(provider=sky.AWS(), nodes=2) as pool:\n    train() @ pool\n",
            expected=["Epoch 3: loss=0.5000"],
        ),
        Block(
            "003-order",
            order,
            before="import skyproxy as sky\n",
            after="print(type(train()).__name__)",
            expected=["PendingCompute"],
        ),
    ]
    parts = unfenced("004")
    image = next(part for part in parts if part.startswith("image="))
    main = next(part for part in parts if part.startswith("if __name__"))
    rest = [part for part in parts if part not in (image, main)]
    # The page shows the main part before the function it calls, and the image twice.
    program = DATA + "import torch\nimport torch.nn as nn\nimport skyproxy as sky\n"
    made.append(
        Block(
            "004-round-trip",
            "".join(f"{part}\n" for part in rest) + main,
            before=program,
            after=(
                "    assert type(trained_model) is MNISTClassifier\n"
                "    assert (trained_model(x_test).argmax(1) == y_test).float().mean() > 0.8\n"
            ),
            expected=["Before training:", "epoch 10/10", "After training:"],
        )
    )
    made.append(
        Block(
            "004-image",
            image,
            before="import torch\nimport skyproxy as sky\nTORCH_VERSION = torch.__version__.split('+')[0]\n",
            after="print(image[0].index_of('torch'), image[0].index_of('numpy'))",
            expected=["https://download.pytorch.org/whl/cpu None"],
        )
    )
    return made


BLOCKS = documents()


def exchanged(code: str, model: Path | None, cache: Path) -> str:
    for pattern, replacement in EXCHANGED:
        code = re.sub(pattern, replacement, code)
    return code.replace('"MODEL"', repr(str(model))).replace('"CACHE"', repr(str(cache)))


def run_program(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a file as a program, `await` at its top level included."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(item for item in sys.path if item)]),
        "HF_HUB_OFFLINE": "1",
        "XDG_CONFIG_HOME": str(file.parent / "config"),
        "SKYPROXY_PROVIDER": "local",
    }
    return subprocess.run(
        [sys.executable, "-c", RUN, str(file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
        cwd=file.parent,
        env=environment,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model with a tokenizer and a chat template, all made here."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    file = folder / "make.py"
    file.write_text(MODEL)
    done = run_program(file, str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def program_of(block: Block, model: Path | None, folder: Path) -> str:
    code = block.before + block.code + "\n" + block.after + "\n"
    return exchanged(code, model, folder / "cache")


def parameters() -> list[object]:
    if not BLOCKS:
        return [pytest.param(None, marks=pytest.mark.skip("the documents are not beside this checkout: shared/seeds"))]
    return [pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.slow else []) for block in BLOCKS]


@pytest.mark.parametrize("block", parameters())
def test_a_block_runs(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if block.exempt:
        pytest.skip(block.exempt)
    needs_model = '"Qwen/' in block.code
    made = request.getfixturevalue("model") if needs_model else None
    file = tmp_path / "block.py"
    file.write_text(program_of(block, made, tmp_path))
    done = run_program(file)
    report = f"{textwrap.indent(file.read_text(), '    ')}\n{done.stdout}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, report
    for text in block.expected:
        assert text in done.stdout, f"{text!r} was not printed\n{report}"


@pytest.mark.skipif(not BLOCKS, reason="the documents are not beside this checkout: shared/seeds")
def test_every_block_of_the_documents_is_here() -> None:
    for number in ("000", "001", "002", "003"):
        assert len(fenced(number)) == sum(block.name.startswith(number) for block in BLOCKS)
    assert len(unfenced("004")) >= 7
    whole = next(block for block in BLOCKS if block.name == "004-round-trip").code
    for part in unfenced("004"):
        assert part in whole or part.startswith("image=")
