"""Kubernetes: the kustomization and the Helm chart are valid, equal, and right for `timerd`.

`make deploy-check` installs the tools that render and check them. Without the tools, these tests
are skipped.
"""

import json
import os
import re
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.security.certificates import CertificateFiles, read_certificate
from cluster.security.identities import IdentityKind
from cluster.settings.config import NodeConfig, build_config, from_env, parse_address
from deploy.certificate_store import CertificateStore
from tests.deploy.kubernetes import ROOT, call
from tests.distributions import project_version
from timerclient.cli import timerctl

BASE: Final = ROOT / "deploy/kubernetes/base"
COMPONENT: Final = "components/backup"
CHART: Final = ROOT / "deploy/helm/timer-cluster"
HELM: Final = ("template", "--namespace=timers", "--kube-version=1.31.0")
MONITORS: Final = "serviceMonitor.enabled=true,prometheusRule.enabled=true"
BACKUPS: Final = "backup.enabled=true,backup.store=s3://timers"


@cache
def chart(*words: str, release: str = "timerd") -> dict[str, Any]:
    return objects(call("helm", *HELM, release, str(CHART), *words))


def objects(manifests: str) -> dict[str, Any]:
    """Return the objects by kind and name; each has only fields of its kind."""
    found = json.loads(call("typed-manifests", stdin=manifests))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


def comparable(rendered: dict[str, Any]) -> Any:
    """Return the objects without Helm's labels, the marks that restart nodes, and namespaces."""
    text = re.sub(r"(timerd-config)-\w+", r"\1", json.dumps(rendered))
    found = json.loads(text)
    for each in found.values():
        each["metadata"].pop("namespace", None)
        for label in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            each["metadata"]["labels"].pop(label, None)
        if each["kind"] == "StatefulSet":
            each["spec"]["template"]["metadata"].pop("annotations", None)
    return found


def node_config(workload: Any, config: Any, pod: str) -> NodeConfig:
    """Return the settings of a pod, by the product's own parser."""
    [container] = workload["spec"]["template"]["spec"]["containers"]
    fields = {"metadata.name": pod, "metadata.namespace": "timers"}
    env = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    for known in ("NAMESPACE", "TIMERD_NAME"):
        env = {name: value.replace(f"$({known})", env[known]) for name, value in env.items()}
    assert env["FOUNDERS"] == "timerd-0,timerd-1,timerd-2"
    return build_config(tomllib.loads(config["data"]["timerd.toml"]), from_env(env))


@pytest.mark.parametrize(("folder", "tls"), [("monitored", "false"), ("secured", "true")])
def test_kustomization_and_chart_are_the_same(folder: str, tls: str) -> None:
    built = call("kustomize", "build", str(ROOT / "deploy/kubernetes" / folder))
    charted = chart("--no-hooks", f"--set={MONITORS},tls.enabled={tls}")
    assert "PrometheusRule timerd" in charted
    assert comparable(charted) == comparable(objects(built))


def test_pods_in_maintenance_run_no_node_and_reach_the_store(tmp_path: Path) -> None:
    parts = ROOT / "deploy/kubernetes"
    base, maintenance = (
        os.path.relpath(parts / each, tmp_path) for each in ("base", "components/maintenance")
    )
    text = f"resources: [{base}]\ncomponents: [{maintenance}]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    found = objects(call("kustomize", "build", str(tmp_path)))
    charted = chart("--no-hooks", "--set=maintenance=true")
    assert comparable(charted) == comparable(found)
    pod = found["StatefulSet timerd"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert not pod.keys() & {"initContainers"}
    assert not [name for name in container if name.endswith("Probe")], "it would end the pod"
    assert {each["name"] for each in container["volumeMounts"]} >= {"data", "config"}
    usual = chart("--no-hooks")["NetworkPolicy timerd"]["spec"]
    assert (usual["policyTypes"], "egress" in usual) == (["Ingress", "Egress"], True)
    policy = found["NetworkPolicy timerd"]["spec"]
    assert (policy["policyTypes"], "egress" in policy) == (["Ingress"], False)
    # Its pods are ready, and no node is without others: a rolling update to nodes would not go on.
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert 0 < page.find("statefulset/timerd --replicas=0") < page.find("--set maintenance=false")


def test_node_whose_memory_is_resized_in_place_restarts() -> None:
    [node] = chart("--no-hooks")["StatefulSet timerd"]["spec"]["template"]["spec"]["containers"]
    policy = {"resourceName": "memory", "restartPolicy": "RestartContainer"}
    assert node["resizePolicy"] == [policy], "it reads the limit once (cluster/rpc/memory.py)"


def test_clients_reach_both_ports_of_the_service() -> None:
    rendered = chart("--no-hooks")
    ports = {each["name"] for each in rendered["Service timerd"]["spec"]["ports"]}
    admitted = rendered["NetworkPolicy timerd"]["spec"]["ingress"][0]
    assert admitted["from"][1]["podSelector"]["matchLabels"] == {"timer-client": "true"}
    assert {each["port"] for each in admitted["ports"]} == ports == {"grpc", "http"}


def test_backups_reach_the_nodes_through_the_network_policy(tmp_path: Path) -> None:
    parts = ROOT / "deploy/kubernetes"
    base, backup = (os.path.relpath(parts / each, tmp_path) for each in ("base", COMPONENT))
    text = f"resources: [{base}]\ncomponents: [{backup}]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    found = objects(call("kustomize", "build", str(tmp_path)))
    template = found["CronJob timerd-backup"]["spec"]["jobTemplate"]["spec"]["template"]
    rules = found["NetworkPolicy timerd"]["spec"]["ingress"]
    admitted = rules[0]["from"][1]["podSelector"]["matchLabels"]
    assert admitted.items() <= template["metadata"]["labels"].items()
    env = template["spec"]["containers"][0]["env"]
    [where] = [each["value"] for each in env if each["name"] == "TIMERCTL_ENDPOINTS"]
    assert f"Service {where.removesuffix(':7401')}" in found
    [store] = [each["value"] for each in env if each["name"] == "STORE"]
    values = f"--set=backup.enabled=true,backup.store={store},backup.serviceAccountName=role"
    for name, each in chart("--no-hooks", values).items():
        if name.startswith("CronJob"):
            spec = each["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            assert spec["serviceAccountName"] == "role"
    charted = chart("--no-hooks", f"--set=backup.enabled=true,backup.store={store}")
    job = {"CronJob timerd-backup", "CronJob timerd-backup-verify"}
    assert comparable(_only(charted, job)) == comparable(_only(found, job))


def test_continuous_backups_run_once_and_reach_the_nodes(tmp_path: Path) -> None:
    parts = ROOT / "deploy/kubernetes"
    base, backup = (
        os.path.relpath(parts / each, tmp_path) for each in ("base", f"{COMPONENT}-follow")
    )
    text = f"resources: [{base}]\ncomponents: [{backup}]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    found = objects(call("kustomize", "build", str(tmp_path)))
    follow, verify = "Deployment timerd-backup-follow", "CronJob timerd-backup-verify"
    workload = found[follow]["spec"]
    assert (workload["replicas"], workload["strategy"]) == (1, {"type": "Recreate"})
    template = workload["template"]
    labels = template["metadata"]["labels"]
    rules = found["NetworkPolicy timerd"]["spec"]["ingress"]
    assert rules[0]["from"][1]["podSelector"]["matchLabels"].items() <= labels.items()
    [container] = template["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert f"Service {env['TIMERCTL_ENDPOINTS'].removesuffix(':7401')}" in found
    values = f"--set=backup.enabled=true,backup.store={env['STORE']},backup.follow="
    charted, hourly = chart("--no-hooks", f"{values}true"), chart("--no-hooks", f"{values}false")
    both = {follow, verify}
    assert comparable(_only(charted, both)) == comparable(_only(found, both))
    for rendered in (charted, found):
        assert "CronJob timerd-backup" not in rendered, "its prune must not run beside a backup"
    assert follow not in hourly
    job = hourly["CronJob timerd-backup"]["spec"]["jobTemplate"]["spec"]["template"]
    assert not workload["selector"]["matchLabels"].items() <= job["metadata"]["labels"].items()
    [scheduled] = job["spec"]["initContainers"]
    assert container == scheduled | {"args": container["args"]}
    own = {"initContainers", "restartPolicy", "containers"}
    assert job["spec"]["restartPolicy"] == "Never"
    shared = {name: value for name, value in job["spec"].items() if name not in own}
    following = {"containers": [container], "terminationGracePeriodSeconds": 300}
    assert template["spec"] == shared | following


def _only(rendered: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: rendered[name] for name in names}


def test_pod_of_timerctl_is_admitted_and_has_a_certificate() -> None:
    found = objects((ROOT / "deploy/kubernetes/timerctl.yaml").read_text())["Pod timerctl"]
    tried = chart("--set=tls.enabled=true")["Pod timerd-status"]
    [container], [other] = found["spec"]["containers"], tried["spec"]["containers"]
    assert timerctl.own_parser().parse_args(other["command"][1:]).wait, "nodes may start meanwhile"
    assert container["env"] == other["env"]
    assert container["securityContext"] == other["securityContext"]
    assert found["metadata"]["labels"].items() >= {"timer-client": "true"}.items()
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounted.items() >= {e["mountPath"]: e["name"] for e in other["volumeMounts"]}.items()


def test_maintenance_suspends_the_backups() -> None:
    backups = "--set=backup.enabled=true,backup.store=s3://timers,maintenance="
    for maintenance, suspended in (("true", True), ("false", None)):
        job = chart(f"{backups}{maintenance}")["CronJob timerd-backup"]
        assert job["spec"].get("suspend") is suspended
        words = f"{backups}{maintenance},backup.follow=true"
        workload = chart(words)["Deployment timerd-backup-follow"]
        assert workload["spec"]["replicas"] == (0 if suspended else 1)


def test_backups_with_tls_have_a_certificate_and_a_store() -> None:
    enabled = "--set=backup.enabled=true,tls.enabled=true,backup.store="
    job = chart(f"{enabled}s3://timers")["CronJob timerd-backup"]["spec"]["jobTemplate"]
    following = f"{enabled}s3://timers,backup.follow=true"
    for owner in (job, chart(following)["Deployment timerd-backup-follow"]):
        pod = owner["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            env = {each["name"]: each["value"] for each in container["env"]}
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            for name, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
                folder, _, key = env[f"TIMERCTL_TLS_{name}"].rpartition("/")
                assert key == file
                assert mounts[folder] in {each["name"] for each in pod["volumes"]}
    rendered = chart(f"{enabled}s3://timers")["CronJob timerd-backup-verify"]
    [verifying] = rendered["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in verifying["env"]] == ["STORE"], "no node is asked"
    assert "volumeMounts" not in verifying
    with pytest.raises(AssertionError, match="backup"):
        chart(enabled)


def test_pods_with_tls_have_the_files_and_ports_that_timerd_takes(tmp_path: Path) -> None:
    rendered = chart("--set=tls.enabled=true")
    workload, config = rendered["StatefulSet timerd"], rendered["ConfigMap timerd-config"]
    pod = workload["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "tls"]
    store, mount = CertificateStore(tmp_path / "certs"), "/etc/timerd/tls/"
    store.create("timerd")
    held: dict[str, Path] = {}
    for source in volume["projected"]["sources"]:
        found = source.get("secret") or source["configMap"]
        node = found["name"].removesuffix("-tls")
        files = {
            ("timerd-client-ca", "ca.crt"): store.path("client-ca"),
            ("timerd-access", "access.toml"): store.access,
        }
        if node.startswith("timerd-") and node[-1].isdecimal():
            files = {(found["name"], "ca.crt"): store.path("ca")}
            files[found["name"], "tls.crt"] = store.issue(IdentityKind.NODE, node)
            files[found["name"], "tls.key"] = store.path(f"node-{node}", key=True)
        for item in found["items"]:
            held[mount + item["path"]] = files[found["name"], item["key"]]
    for name in ("timerd-0", "timerd-1", "timerd-2"):
        settings = node_config(workload, config, name)
        assert settings.links[name] == f"{name}.timerd-nodes.timers.svc:7402"
        assert parse_address("link", settings.link).port == 7402
        assert parse_address("replication", settings.replication).port == 7404
        tls = settings.tls
        chosen = CertificateFiles(
            ca=str(held[tls.ca]),
            client_ca=str(held[tls.client_ca]),
            certificate=str(held[tls.certificate]),
            key=str(held[tls.key]),
        )
        read_certificate(chosen, name=name, cluster_id=settings.cluster_id)
        assert tls.key == f"{mount}{name}/tls.key"
        assert held[tls.access] == store.access
    assert "volumes" in rendered["Pod timerd-status"]["spec"]


def test_objects_of_prometheus_have_labels_and_the_address_of_the_runbook() -> None:
    words = [
        f"{each}.enabled=true,{each}.labels.release=p"
        for each in ("serviceMonitor", "prometheusRule")
    ]
    rendered = chart("--no-hooks", f"--set={','.join(words)},prometheusRule.repository=https://x/")
    for name in ("ServiceMonitor timerd", "PrometheusRule timerd"):
        assert rendered[name]["metadata"]["labels"]["release"] == "p"
    rules = rendered["PrometheusRule timerd"]["spec"]["groups"][0]["rules"]
    urls = {each["annotations"]["runbook_url"] for each in rules}
    assert {url.partition("#")[0] for url in urls} == {"https://x/docs/runbook.md"}


def test_tokens_have_their_port_and_their_file() -> None:
    rendered = chart("--no-hooks", "--set=tls.enabled=true,tls.tokens=true")
    workload = rendered["StatefulSet timerd"]
    settings = node_config(workload, rendered["ConfigMap timerd-config"], "timerd-0")
    assert parse_address("tokens", settings.tokens).port == 7403
    [volume] = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "tls"]
    [source] = [s for s in volume["projected"]["sources"] if "timerd-tokens" in str(s)]
    [item] = source["secret"]["items"]
    assert settings.tls.tokens == f"/etc/timerd/tls/{item['path']}"
    for name in ("Service timerd", "Service timerd-nodes"):
        assert "tokens" in {each["name"] for each in rendered[name]["spec"]["ports"]}
    ports = rendered["NetworkPolicy timerd"]["spec"]["ingress"][0]["ports"]
    assert "tokens" in {each["port"] for each in ports}
    with pytest.raises(AssertionError, match="enabled"):
        chart("--set=tls.tokens=true")


def test_pods_of_the_chart_have_settings_that_timerd_takes() -> None:
    values = "serviceMonitor.enabled=true,httpNames={timers.lan}"
    rendered = chart("--no-hooks", f"--set={values}")
    workload, config = rendered["StatefulSet timerd"], rendered["ConfigMap timerd-config"]
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for name in ("timerd-0", "timerd-1", "timerd-2"):
        settings = node_config(workload, config, name)
        assert settings.name == name
        assert settings.peers[name] == f"{name}.timerd-nodes.timers.svc:{ports['grpc']}"
        assert parse_address("grpc", settings.grpc).port == ports["grpc"]
        assert parse_address("http", settings.http).port == ports["http"]
        assert {"timerd.timers.svc", "timers.lan"} <= {*settings.http_names.split(",")}
        stop_s = pod["terminationGracePeriodSeconds"]
        [_, wait_s] = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (stop_s - int(wait_s)) * 1_000 >= 2 * settings.timing.drain_timeout_ms
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        assert any(settings.data.is_relative_to(mount) for mount in mounts)


@pytest.mark.parametrize(
    "values",
    [
        ("replicas=5", "antiAffinity=soft", "storage.className=fast", "clusterId=prod"),
        ("networkPolicy.enabled=false", "image.pullPolicy=Always", "image.pullSecrets[0]=hub"),
        ("nodeSelector.disk=ssd", "tolerations[0].key=timers", "priorityClassName=high"),
    ],
)
def test_chart_is_valid_with_other_values(values: tuple[str, ...]) -> None:
    rendered = chart(*(f"--set={each}" for each in values))
    assert "StatefulSet timerd" in rendered


def pods_of(rendered: dict[str, Any]) -> dict[str, Any]:
    """Return the specifications of all pods by the name of their object."""
    found = {}
    for name, each in rendered.items():
        spec = each.get("spec", {})
        template = spec.get("jobTemplate", each)["spec"].get("template") if spec else None
        if template or each["kind"] == "Pod":
            found[name] = (template or each)["spec"]
    return found


def test_all_pods_have_the_image_and_the_place_of_the_values() -> None:
    values = "image.pullPolicy=Always,image.pullSecrets={hub},priorityClassName=high"
    place = "nodeSelector.disk=ssd,tolerations[0].key=timers"
    pods = [
        pod
        for follow in ("true", "false")
        for pod in pods_of(
            chart(f"--set={values},{place},{BACKUPS},backup.follow={follow}")
        ).items()
    ]
    assert {name.partition(" ")[0] for name, _ in pods} == {
        *("StatefulSet", "CronJob", "Deployment", "Pod")
    }
    for name, pod in pods:
        assert pod["imagePullSecrets"] == [{"name": "hub"}], name
        chosen = [pod["nodeSelector"], pod["tolerations"], pod["priorityClassName"]]
        assert chosen == [{"disk": "ssd"}, [{"key": "timers"}], "high"], name
        containers = [*pod["containers"], *pod.get("initContainers", ())]
        assert {each["imagePullPolicy"] for each in containers} == {"Always"}, name


def test_a_node_is_added_without_a_rolling_update(tmp_path: Path) -> None:
    """It is not ready before the others know it, and a rolling update would wait for it first."""
    values = "--set=replicas=4,tls.enabled=true"
    charted = comparable(chart("--no-hooks", values))
    page = (ROOT / "docs/kubernetes.md").read_text()
    [patches] = re.findall(r"```yaml\n(patches:\n.*?)```", page, re.DOTALL)
    base, tls = (
        os.path.relpath(ROOT / "deploy/kubernetes" / each, tmp_path)
        for each in ("base", "components/tls")
    )
    text = f"resources: [{base}]\ncomponents: [{tls}]\n{patches}"
    (tmp_path / "kustomization.yaml").write_text(text)
    found = comparable(objects(call("kustomize", "build", str(tmp_path))))
    assert found.keys() == charted.keys()
    config = found["ConfigMap timerd-config"]
    for pod in ("timerd-0", "timerd-3"):
        settings = [
            node_config(each["StatefulSet timerd"], config, pod) for each in (charted, found)
        ]
        assert settings[0] == settings[1]
    text = json.dumps(found["StatefulSet timerd"])
    assert text.count("timerd-2.timerd-nodes.timers.svc:7401") == 2, "in both containers"
    places = [each["StatefulSet timerd"]["spec"]["template"]["spec"] for each in (charted, found)]
    assert places[0]["volumes"] == places[1]["volumes"]
    for rendered in (charted, found):
        workload = rendered["StatefulSet timerd"]["spec"]
        assert workload["replicas"] == 4
        assert not workload.get("updateStrategy"), "an apply keeps the one that is patched in"


def test_values_of_the_previous_chart_render() -> None:
    """`helm upgrade --reuse-values` gives the new templates the old chart's values alone."""
    new = "backup", "httpNames", "maintenance", "tls.tokens"
    later = "serviceMonitor.labels", "prometheusRule.labels", "prometheusRule.repository"
    old = ",".join(f"{name}=null" for name in (*new, *later))
    assert len(chart(f"--set={old}", f"--set={MONITORS}")) > len(chart())
    maintained = chart(f"--set={old}", "--set=maintenance=true")["StatefulSet timerd"]
    assert "initContainers" not in maintained["spec"]["template"]["spec"]
    with pytest.raises(AssertionError, match="--reset-then-reuse-values"):
        chart("--set=backup.keep=null,backup.enabled=true,backup.store=s3://b/p")


@pytest.mark.parametrize(
    "name",
    [
        *("settings", "replicas", "founders", "storage.size", "image.repository", "tls"),
        *("antiAffinity", "terminationGracePeriodSeconds", "image.pullPolicy"),
        *("networkPolicy.clientLabels", "networkPolicy.monitoringNamespace"),
        *("serviceMonitor", "prometheusRule", "image", "storage", "networkPolicy"),
    ],
)
def test_values_that_the_templates_need_may_not_be_null(name: str) -> None:
    with pytest.raises(AssertionError, match="missing property '" + name.rpartition(".")[2]):
        chart(f"--set={name}=null")


def test_image_has_a_tag_or_a_digest() -> None:
    for tag, image in (("1.2", "timer-cluster:1.2"), ("sha256:ab", "timer-cluster@sha256:ab")):
        pod = chart(f"--set-string=image.tag={tag}")["Pod timerd-status"]["spec"]
        assert pod["containers"][0]["image"] == image


def test_names_of_digits_are_strings() -> None:
    policy = chart("--set-string=networkPolicy.monitoringNamespace=1234")["NetworkPolicy timerd"]
    labels = [
        source["namespaceSelector"].get("matchLabels")
        for rule in policy["spec"]["ingress"]
        for source in rule["from"]
        if "namespaceSelector" in source
    ]
    assert {"kubernetes.io/metadata.name": "1234"} in labels


@pytest.mark.parametrize("release", ["on", "y", "e-1", 38 * "a"])
def test_names_of_releases_are_strings(release: str) -> None:
    for follow in ("true", "false"):
        values = f"{MONITORS},tls.enabled=true,{BACKUPS},backup.follow={follow}"
        rendered = chart(f"--set={values}", release=release)
        assert {f"StatefulSet {release}", f"ServiceMonitor {release}"} <= {*rendered}


@pytest.mark.parametrize(
    ("release", "values"),
    [("123", ""), ("1e3", ""), ("a.b", ""), (53 * "a", ""), (39 * "a", BACKUPS)],
)
def test_names_of_releases_that_no_object_may_have_are_refused(release: str, values: str) -> None:
    with pytest.raises(AssertionError, match="name of the release"):
        chart(f"--set={values}", release=release)


@pytest.mark.parametrize(
    "name",
    [
        "networkPolicy.clientLabels.team",
        "nodeSelector.pool",
        "podAnnotations.a",
        "serviceMonitor.labels.release",
        "prometheusRule.labels.release",
    ],
)
def test_labels_and_annotations_are_strings(name: str) -> None:
    for value in ("1", "true"):
        with pytest.raises(AssertionError, match="want string"):
            chart(f"--set={name}={value}")
        assert chart(f"--set={MONITORS}", f"--set-string={name}={value}")


@pytest.mark.parametrize("size", ["2Gi", "2.5G", "2048Mi", "1Ti", "1T", "2147483648"])
def test_volumes_have_room_for_more_than_the_reserve(size: str) -> None:
    assert chart(f"--set-string=storage.size={size}")


@pytest.mark.parametrize("size", ["1Gi", "1.9Gi", "1.5G", "2047Mi", "900M", "2147483647"])
def test_volumes_of_the_size_of_the_reserve_are_refused(size: str) -> None:
    with pytest.raises(AssertionError, match="reserve_bytes"):
        chart(f"--set-string=storage.size={size}")
    settings = f"--set=settings=[storage]\nreserve_bytes={256 << 20}"
    assert chart(f"--set-string=storage.size={size}", settings)


@pytest.mark.parametrize(
    "settings",
    [
        *("[timing]\ndrain_timeout_ms = 25_000", "timing.drain_timeout_ms=40000 # long"),
        *("timing.drain_timeout_ms = +40000", 'timing."drain_timeout_ms" = 0x9c40'),
        "timing = {drain_timeout_ms = 40_000}",
    ],
)
def test_a_stop_that_kubernetes_would_cut_short_is_refused(settings: str) -> None:
    with pytest.raises(AssertionError, match="terminationGracePeriodSeconds: 30 is too short"):
        chart(f"--set=settings={settings}")
    assert chart(f"--set=settings={settings},terminationGracePeriodSeconds=46")
    assert chart(f"--set=settings=#{settings.replace(chr(10), chr(10) + '#')}")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("insecure = tru", "settings: must be valid TOML: toml: line 1"),
        ("timing = 5", "settings: timing must be a table"),
    ],
)
def test_settings_that_are_no_toml_are_refused(settings: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        chart(f"--set=settings={settings}")


@pytest.mark.parametrize("size", ["20m", "20k", "20Ki", "1.2.3Gi", ".Gi"])
def test_sizes_of_volumes_that_are_none_are_refused(size: str) -> None:
    with pytest.raises(AssertionError, match="pattern"):
        chart(f"--set-string=storage.size={size}")


@pytest.mark.parametrize("name", ["schedule", "verifySchedule"])
def test_schedules_of_backups_have_five_fields_or_are_a_word(name: str) -> None:
    for schedule in ("@hourly", "@every 90m", "*/5  0-6 * * 1"):
        rendered = chart(f"--set={BACKUPS},backup.{name}={schedule}")
        assert schedule in {
            each["spec"]["schedule"] for each in rendered.values() if each["kind"] == "CronJob"
        }
    for schedule in ("* * * *", "0 7 * * * *", "every hour", "@"):
        with pytest.raises(AssertionError, match="pattern"):
            chart(f"--set={BACKUPS},backup.{name}={schedule}")


@pytest.mark.parametrize(
    "settings", ["  insecure = true\n", "\n  a = 1\nb = 2\n", " a = 1\n\n\tb = 2\n"]
)
def test_settings_may_begin_with_an_indented_line(settings: str) -> None:
    config = chart(f"--set=settings={settings}")["ConfigMap timerd-config"]
    assert config["data"]["timerd.toml"] == settings


def notes(path: Path, values: str) -> str:
    """Return the text that `helm install` shows at its end."""
    shutil.copytree(CHART, path)
    text = (path / "templates/NOTES.txt").read_text()
    shown = '\nnotes: {{ include "notes" . | toJson }}'
    defined = f'{{{{- define "notes" }}}}{text}{{{{ end -}}}}'
    (path / "templates/notes.yaml").write_text(defined + shown)
    made = call("helm", *HELM, "r", str(path), f"--set={values}", "-s=templates/notes.yaml")
    return str(json.loads(made.partition("notes: ")[2]))


def test_notes_name_only_commands_that_work(tmp_path: Path) -> None:
    plain = notes(tmp_path / "plain", "replicas=3")
    assert notes(tmp_path / "null", "tls.enabled=null") == plain
    assert "kubectl -n timers exec r-0 -- timerctl status" in plain
    assert "secret" not in plain
    values = f"tls.enabled=true,tls.tokens=true,{MONITORS},{BACKUPS}"
    secured = notes(tmp_path / "secured", values)
    assert "exec timerctl -- timerctl status" in secured, (
        "nodes have no administrator's certificate"
    )
    assert "exec r-0" not in secured
    needed = {
        f"{name}-tls" for name in ("r-0", "r-1", "r-2", "r-admin", "r-backup", "r-monitoring")
    }
    needed |= {"r-client-ca", "r-tokens"}
    assert {*re.findall(r"secret ([\w-]+)", secured)} == needed
    rendered = json.dumps(chart(f"--set={values}", release="r"))
    assert {*re.findall(r"ConfigMap (r-\S+)", secured)} == {"r-access"}
    assert [name for name in (*needed, "r-access") if f'"{name}"' not in rendered] == []
    maintained = notes(tmp_path / "maintained", "maintenance=true,tls.enabled=true")
    assert "timerctl" not in maintained, "no node runs"
    assert "#repair-and-restore" in maintained


def test_chart_is_clean() -> None:
    call("helm", "lint", "--strict", str(CHART))


def test_manifests_are_of_this_version() -> None:
    version = project_version()
    pages = [*(ROOT / "deploy/kubernetes").rglob("*.yaml"), ROOT / "deploy/container/compose.yaml"]
    images = re.findall(r"image: timer-cluster:(\S+)", "".join(each.read_text() for each in pages))
    assert {*images} == {version}, images
    text = (CHART / "Chart.yaml").read_text()
    assert re.findall(r"(?:^version|^appVersion): (\S+)", text, re.MULTILINE) == [version] * 2
