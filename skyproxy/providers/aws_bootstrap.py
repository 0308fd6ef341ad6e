"""The script that an instance runs when it starts: cloud-init runs it once, as root; workers then run as a user of
their own.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command
from skyproxy.runtime.instance import POOL_VARIABLE

PORT = 8765
SERVER_NAME = "worker.skyproxy.internal"
"""The name that the certificates are for: addresses are not known when they are made."""
_FOLDER = "/var/lib/skyproxy"
_HOME = f"{_FOLDER}/home"
_USER = "skyproxy"
_VALID_DAYS = 30
_INSTALL_SECONDS = 1800.0
_LONGEST_SECONDS = 1e9
_NAME_OF_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_END = "SKYPROXY_END"


@dataclass(frozen=True)
class Keys:
    """The keys with which workers of one launch prove themselves. All texts are PEM.

    Attributes:
        authority: what the client trusts, and nothing else.
        certificate: the workers'.
        key: the private key of it.
    """

    authority: str
    certificate: str
    key: str

    def __repr__(self) -> str:
        return "Keys(...)"


def new_keys() -> Keys:
    """An authority for one launch, and a certificate of it; the authority's own key is forgotten at once.

    Raises:
        ConfigurationError: cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"AWS() needs cryptography. Install it: {install_command('aws')}") from error
    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey, is_authority: bool) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("skyproxy launch"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    authority = builder("skyproxy launch", authority_key, True).add_extension(usage, critical=True)
    names = [x509.DNSName(SERVER_NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    worker = builder(SERVER_NAME, key, False).add_extension(x509.SubjectAlternativeName(names), critical=False)
    encoding = serialization.Encoding.PEM
    return Keys(
        authority.sign(authority_key, hashes.SHA256()).public_bytes(encoding).decode(),
        worker.sign(authority_key, hashes.SHA256()).public_bytes(encoding).decode(),
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode(),
    )


@dataclass(frozen=True)
class SecretStore:
    """The place where an instance finds its secrets, so that its user data has none.

    Attributes:
        parameter: name of a parameter of SSM, encrypted: JSON, a text by file name.
        region: of it.
    """

    parameter: str
    region: str


def secret_files(keys: Keys, token: str, env: dict[str, str]) -> dict[str, str]:
    """Return the files of an instance that nobody but its worker may read, by name.

    Raises:
        ConfigurationError: a variable has a name that none can have, or a text that the script cannot hold.
    """
    for key, value in env.items():
        if not _NAME_OF_VARIABLE.fullmatch(key) or "\0" in value or _END in value.splitlines():
            raise ConfigurationError(f"AWS(): the variable {key!r} cannot be one of a worker there. Leave it out.")
    variables = "\n".join(f"{key}={_quote(value)}" for key, value in env.items())
    return {"token": token, "tls.key": keys.key, "env": variables}


def _quote(value: str) -> str:
    """Quote a value as systemd reads it in a file of variables: any text stays what it is, with its line ends."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def startup_script(
    *,
    keys: Keys,
    token: str,
    python: str,
    apt: Sequence[str],
    install_steps: Sequence[Sequence[str]],
    env: dict[str, str],
    name: str,
    nodes: int,
    procs_per_node: int,
    idle_seconds: float,
    lifetime_seconds: float | None,
    store: SecretStore | None = None,
) -> str:
    """The script: a watch that ends the instance when nobody needs it, software, a service for each process.

    Args:
        keys: of this launch.
        token: what clients must know.
        python: the version of the interpreter.
        apt: Debian packages.
        install_steps: arguments of the installer, one run after the other.
        env: variables of the workers.
        name: of the pool.
        nodes: in the pool; the instance learns which one it is.
        procs_per_node: services.
        idle_seconds: after how long without work it shuts down, which terminates it; also where its client crashed.
        lifetime_seconds: after how long in any case.
        store: where the instance fetches token, key and variables; None puts them into the script.
    """

    def write(path: str, text: str, mode: str = "600") -> str:
        return f"install -m {mode} /dev/null {path}\ncat > {path} <<'SKYPROXY_END'\n{text.rstrip()}\nSKYPROXY_END"

    topology = json.dumps({"total_nodes": nodes, "procs_per_node": procs_per_node, "job": name})
    secrets = {} if store is not None else secret_files(keys, token, env)
    lines = [
        "#!/bin/bash",
        "set -euo pipefail",
        "umask 022",
        f"mkdir -p -m 711 {_FOLDER}",
        f"id {_USER} >/dev/null 2>&1 || useradd --system --home-dir {_HOME} --shell /usr/sbin/nologin {_USER}",
        f"install -d -o {_USER} -g {_USER} -m 700 {_HOME}",
        *(write(f"{_FOLDER}/{file}", text) for file, text in secrets.items()),
        write(f"{_FOLDER}/tls.crt", keys.certificate, "644"),
        _watch(procs_per_node, idle_seconds, lifetime_seconds),
        _METADATA,
        "NODE=$(imds ami-launch-index || echo 0)",
        "export DEBIAN_FRONTEND=noninteractive",
        "apt-get update -q",
        "apt-get install -q -y --no-install-recommends " + " ".join(["python3-venv", "curl", *map(shlex.quote, apt)]),
        "python3 -m venv /opt/skyproxy-installer",
        # By exact versions and hashes: they run as root.
        write(f"{_FOLDER}/installer.lock", _installer_lock(boto3=store is not None), "644"),
        f"/opt/skyproxy-installer/bin/pip install -q --require-hashes -r {_FOLDER}/installer.lock",
        *([_FETCH.format(parameter=store.parameter, region=store.region)] if store is not None else []),
        # The worker alone reads them; what systemd reads stays root's.
        f"chown {_USER}:{_USER} {_FOLDER}/token {_FOLDER}/tls.key && chmod 400 {_FOLDER}/token {_FOLDER}/tls.key",
        # Not in root's home, which workers do not see.
        "export UV=/opt/skyproxy-installer/bin/uv UV_PYTHON_INSTALL_DIR=/opt/skyproxy-python",
        f"$UV venv -q --python {shlex.quote(python)} /opt/skyproxy-worker",
        # Packages may run code when they are installed: not as root. What they leave is root's afterwards.
        f"chown -R {_USER}:{_USER} /opt/skyproxy-worker",
    ]
    install = f"runuser -u {_USER} -- env HOME={_HOME} $UV pip install -q --python /opt/skyproxy-worker/bin/python "
    lines += [install + shlex.join(arguments) for arguments in install_steps]
    lines.append("chown -R root:root /opt/skyproxy-worker")
    for local_rank in range(procs_per_node):
        port = PORT + local_rank
        unit = f"""[Unit]
Description=skyproxy worker {local_rank}
[Service]
{_CONFINEMENT}
EnvironmentFile={_FOLDER}/env
EnvironmentFile={_FOLDER}/pool-{local_rank}
ExecStart=/opt/skyproxy-worker/bin/python -m skyproxy_server --host 0.0.0.0 --port {port} \
--token-file {_FOLDER}/token --tls-cert {_FOLDER}/tls.crt --tls-key {_FOLDER}/tls.key
Restart=always
[Install]
WantedBy=multi-user.target"""
        lines += [
            _topology(local_rank, topology),
            write(f"/etc/systemd/system/skyproxy-worker-{local_rank}.service", unit),
            f"systemctl enable --now skyproxy-worker-{local_rank}",
        ]
    return "\n".join(lines) + "\n"


_CONFINEMENT = f"""User={_USER}
Group={_USER}
WorkingDirectory={_HOME}
Environment=HOME={_HOME}
UMask=0077
ExecStartPre=+-/usr/bin/nvidia-modprobe -u -c=0
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths={_HOME}
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
IPAddressDeny=169.254.169.254 fd00:ec2::254
LimitMEMLOCK=infinity
LimitNOFILE=1048576"""
"""The beginning of a worker's unit: a user without rights, who writes to its home and temporary files only, and
cannot ask the instance's metadata service, in which are its user data and the credentials of its profile. The module
for CUDA's memory is loaded before, by root: the worker could not do it. Memory may be executed, as compiled graphs
need."""

_FETCH = """cat > /var/lib/skyproxy/fetch.py <<'SKYPROXY_END'
import json, os, sys, time
import boto3

client = boto3.client("ssm", region_name={region!r})
for attempt in range(30):
    try:
        found = client.get_parameter(Name={parameter!r}, WithDecryption=True)["Parameter"]["Value"]
        break
    except Exception as error:
        # The credentials of an instance's profile can come some seconds after it.
        if attempt == 29:
            sys.exit(f"skyproxy: the secrets cannot be fetched: {{error}}")
        time.sleep(2)
for name, text in json.loads(found).items():
    descriptor = os.open(os.path.join(sys.argv[1], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\\n")
SKYPROXY_END
/opt/skyproxy-installer/bin/python /var/lib/skyproxy/fetch.py /var/lib/skyproxy"""

_METADATA = r"""imds() {
  local session; session=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' \
    http://169.254.169.254/latest/api/token)
  curl -sf -H "X-aws-ec2-metadata-token: $session" "http://169.254.169.254/latest/meta-data/$1"
}"""


def _installer_lock(*, boto3: bool) -> str:
    """Return the locked requirements with which the script installs the rest; user data has no room for what is not
    needed.
    """
    text = resources.files("skyproxy.providers").joinpath("installer.lock").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[A-Za-z])", text.strip())
    return "\n".join(block for block in blocks if boto3 or block.startswith("uv=="))


def _topology(local_rank: int, topology: str) -> str:
    """Writes the variable of one process; only the instance knows which node it is."""
    script = f"""import json, sys
pool = json.loads({topology!r})
pool.update(node=int(sys.argv[1]), local_rank={local_rank})
print({POOL_VARIABLE + "="!r} + json.dumps(json.dumps(pool)))"""
    return f"python3 - \"$NODE\" > {_FOLDER}/pool-{local_rank} <<'SKYPROXY_END'\n{script}\nSKYPROXY_END"


def _watch(procs_per_node: int, idle_seconds: float, lifetime_seconds: float | None) -> str:
    """Shuts down when every worker has been idle for long enough: a client that died can no longer do it.

    It begins before anything is installed, so that an installation that fails is no exception.
    """
    # It runs as root, and who answers may be anybody's code: nothing that is said, or not said, ends or stops it.
    script = f"""import http.client, json, ssl, subprocess, threading, time
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
def end():
    subprocess.run(["shutdown", "-h", "now"])
def ask(port):
    link = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    late = threading.Timer(20, lambda: link.sock and link.sock.shutdown(2))
    late.start()
    try:
        token = open("{_FOLDER}/token").read().strip()
        link.request("GET", "/activity", headers={{"Authorization": "Bearer " + token}})
        answer = link.getresponse()
        idle = float(json.loads(answer.read(65536))["idle_seconds"])
        return idle if answer.status == 200 and 0 <= idle < 1e9 else None
    except Exception:
        return None
    finally:
        late.cancel()
        link.close()
def watch():
    silent_since, limit = time.time(), {max(idle_seconds, _INSTALL_SECONDS)}
    while True:
        time.sleep(30)
        said = [ask(port) for port in range({PORT}, {PORT + procs_per_node})]
        if any(idle is not None for idle in said):
            silent_since, limit = time.time(), {idle_seconds}
        if min(time.time() - silent_since if idle is None else idle for idle in said) > limit:
            end()
"""
    if lifetime_seconds is not None:
        script += f"threading.Timer({min(lifetime_seconds, _LONGEST_SECONDS)}, end).start()\n"
    script += "watch()"
    return f"cat > {_FOLDER}/watch.py <<'SKYPROXY_END'\n{script}\nSKYPROXY_END\nnohup python3 {_FOLDER}/watch.py &"
