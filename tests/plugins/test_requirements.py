"""What plugins add to images, without any network."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError
from skyproxy.plugins.requirements import requirement
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.image import Image, PipIndex

CPU = "https://download.pytorch.org/whl/cpu"
CU128 = "https://download.pytorch.org/whl/cu128"


def cluster(accelerator: Accelerator | None = None) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(accelerator=accelerator))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("latest", "torch"),
        ("2.3.0", "torch==2.3.0"),
        ("2.3", "torch==2.3"),
        ("2.9.0+cpu", "torch==2.9.0+cpu"),
        (">=2.3", "torch>=2.3"),
        ("~=2.3", "torch~=2.3"),
        ("!=2.3", "torch!=2.3"),
        ("<3", "torch<3"),
        ("==2.3.*", "torch==2.3.*"),
        (">=2.3,<2.5", "torch>=2.3,<2.5"),
        (" >= 2.3", "torch>= 2.3"),
    ],
)
def test_a_version_becomes_a_requirement(version: str, expected: str) -> None:
    assert requirement("torch", version) == expected
    assert sky.plugins.torch(version=version).requirements() == [expected]


@pytest.mark.parametrize("version", ["newest", "", ">=", "two", "2.3.0; rm -rf /"])
def test_what_is_no_version_is_refused_where_the_plugin_is_made(version: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a version of torch"):
        sky.plugins.torch(version=version)


def test_vision_and_audio_have_versions_of_their_own() -> None:
    plugin = sky.plugins.torch(version="2.3.0", vision="0.18.0", audio="~=2.3")
    assert plugin.requirements() == ["torch==2.3.0", "torchvision==0.18.0", "torchaudio~=2.3"]
    assert sky.plugins.torch(vision="latest").requirements() == ["torch", "torchvision"]


@pytest.mark.parametrize(
    ("accelerator", "url"),
    [
        (None, CPU),
        (Accelerator("A100"), CU128),
        (Accelerator("MI300X"), CPU),
        (Accelerator("Homegrown", metadata={"cuda": True}), CU128),
        (Accelerator("Homegrown", metadata={"memory_gb": 4}), CPU),
    ],
)
def test_the_wheels_fit_the_accelerator(accelerator: Accelerator | None, url: str) -> None:
    image = sky.plugins.torch(vision="latest").transform(Image(), cluster(accelerator))
    assert image.pip_indexes == (PipIndex(url, ["torch", "torchvision"]),)


def test_the_cuda_version_is_the_users() -> None:
    image = sky.plugins.torch(cuda="cu124").transform(Image(), cluster(Accelerator("A100")))
    assert image.index_of("torch") == "https://download.pytorch.org/whl/cu124"
    assert image.index_of("numpy") is None


def test_frameworks_are_loaded_on_workers_only() -> None:
    code = (
        "import sys, pickle, types, skyproxy as sky\n"
        "p = sky.plugins\n"
        "made = [p.torch(backend='gloo', vision='latest'), p.jax(), p.keras(backend='jax'), p.huggingface(),\n"
        "        p.joblib(), p.sklearn(), p.accelerate(), p.coordination()]\n"
        "cluster = types.SimpleNamespace(spec=types.SimpleNamespace(accelerator=sky.Accelerator('A100')))\n"
        "image = sky.Image()\n"
        "for plugin in pickle.loads(pickle.dumps(made)): image = plugin.transform(image, cluster)\n"
        "assert 'torch' in image.pip\n"
        "wrong = {'torch', 'jax', 'keras', 'transformers', 'accelerate', 'sklearn'} & set(sys.modules)\n"
        "assert not wrong, wrong\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_an_image_keeps_what_it_has_and_is_not_changed() -> None:
    own = PipIndex("https://example.org/simple", ["corporate"])
    before = Image(pip=["numpy"], pip_indexes=[own], env={"A": "1"}, apt=["git"])
    after = sky.plugins.torch().transform(before, cluster())
    assert before == Image(pip=["numpy"], pip_indexes=[own], env={"A": "1"}, apt=["git"])
    assert after.pip == ("numpy", "torch")
    assert after.pip_indexes == (own, PipIndex(CPU, ["torch"]))
    assert (after.env, after.apt) == (before.env, before.apt)


def test_transforming_twice_repeats_nothing() -> None:
    plugin = sky.plugins.torch()
    once = plugin.transform(Image(), cluster())
    assert plugin.transform(once, cluster()) == once


@pytest.mark.parametrize(
    ("plugin", "packages"),
    [
        (lambda: sky.plugins.jax(), ("jax",)),
        (lambda: sky.plugins.jax(version="0.5.0"), ("jax==0.5.0",)),
        (lambda: sky.plugins.keras(), ("keras",)),
        (lambda: sky.plugins.keras(version=">=3.5"), ("keras>=3.5",)),
        (lambda: sky.plugins.huggingface(), ("transformers", "datasets", "tokenizers")),
        (lambda: sky.plugins.accelerate(), ("accelerate",)),
        (lambda: sky.plugins.joblib(), ("joblib",)),
        (lambda: sky.plugins.sklearn(version="1.5.0"), ("scikit-learn==1.5.0",)),
        (lambda: sky.plugins.coordination(), ()),
    ],
)
def test_each_plugin_adds_its_packages(plugin: Any, packages: tuple[str, ...]) -> None:
    assert plugin().transform(Image(), cluster()).pip == packages


def test_jax_comes_with_cuda_where_the_accelerator_has_it() -> None:
    assert sky.plugins.jax().transform(Image(), cluster(Accelerator("H100"))).pip == ("jax[cuda12]",)
    assert sky.plugins.jax(version=">=0.5").transform(Image(), cluster(Accelerator("H100"))).pip == (
        "jax[cuda12]>=0.5",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: sky.plugins.torch(init="sometimes"),
        lambda: sky.plugins.jax(init="never"),
        lambda: sky.plugins.keras(backend="theano"),
        lambda: sky.plugins.accelerate(mixed_precision="fp4"),
        lambda: sky.plugins.huggingface(version="x"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_a_plugin_that_does_not_exist_is_explained() -> None:
    with pytest.raises(AttributeError, match="There are: accelerate, barrier"):
        sky.plugins.tensorflow  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"There are: .*torch"):
        sky.integrations.jax  # type: ignore[attr-defined]


def test_a_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(sky.plugins.huggingface(token="hf_secret"))
