"""The files for containers: linted, and the script that formats a node's directory run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from cluster.rpc.node_tls import NodeTls
from cluster.security.identities import IdentityKind
from cluster.settings.config import build_config, from_env
from deploy.certificate_store import CertificateStore
from tests.deploy.kubernetes import call
from tests.distributions import SERVER_LOCK
from timer.files import data_directory
from timer.files.disk import RealDisk

ROOT: Final = Path(__file__).parents[2]
CONTAINER: Final = ROOT / "deploy/container"
COMPOSE: Final = ("compose.yaml", "compose.tls.yaml")


def test_dockerfile_is_clean() -> None:
    call("hadolint", str(CONTAINER / "Dockerfile"))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.tls.yaml"])
def test_compose_file_is_valid(name: str) -> None:
    words = ("--builtin-schema", "vendor.compose-spec", str(CONTAINER / name))
    call("check-jsonschema", *words)


def test_compose_files_with_tls_name_the_files_of_timerctl_certs(tmp_path: Path) -> None:
    text = "".join((CONTAINER / name).read_text() for name in COMPOSE)
    pairs = re.findall(r"^ +(TIMERD_\w+): (\S+)$", text, re.MULTILINE)
    store = CertificateStore(tmp_path / "certs")
    store.create("compose")
    for name in ("n1", "n2", "n3"):
        store.issue(IdentityKind.NODE, name, hosts=[name])
        env = {"TIMERD_NAME": name} | {
            key: value.strip('"').replace("/etc/timerd/tls", str(store.directory))
            for key, value in pairs
            if "node-" not in value or f"node-{name}" in value
        }
        settings = build_config({"data": str(tmp_path)}, from_env(env))
        NodeTls(settings)  # it checks all files
        assert settings.links[name] == f"{name}:7402"
        assert settings.replication == "0.0.0.0:7404"


def test_script_is_clean() -> None:
    call("shellcheck", str(CONTAINER / "timerd-format"))


def test_image_is_built_from_files_that_the_context_holds() -> None:
    context = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(
        r"^COPY (?:--chmod=\S+ )?(\S+) ", (CONTAINER / "Dockerfile").read_text(), re.M
    )
    named = {each for each in copied if not each.startswith("--")}
    assert named == {each[1:] for each in context if each.startswith("!")}
    assert str(SERVER_LOCK.relative_to(ROOT)) in named


@pytest.mark.parametrize(
    ("name", "lost", "founds"),
    [("n1", False, True), ("n1", True, False), ("n4", False, False)],
    ids=["founder", "founder whose disk is lost", "node added later"],
)
def test_script_formats_a_directory_once(
    tmp_path: Path, name: str, *, lost: bool, founds: bool
) -> None:
    data, learners = tmp_path / "data", tmp_path / "learners"
    learners.mkdir()
    if lost:
        (learners / name).touch()
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TIMERD_NAME": name,
        "TIMERD_CLUSTER_ID": "c",
        "TIMERD_DATA": str(data),
        "FOUNDERS": " n2, n1 ,n3 ",
        "LEARNERS": str(learners),
    }
    for _ in range(2):
        subprocess.run([CONTAINER / "timerd-format"], env=env, check=True, capture_output=True)
    identity = data_directory.read_identity(RealDisk(), data)
    assert (identity.name in identity.founding_voters) == founds
    assert {*identity.founding_voters} | {name} == {"n1", "n2", "n3", name}
