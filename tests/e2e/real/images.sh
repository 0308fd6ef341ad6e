#!/usr/bin/env bash
# Builds the images that real nodes run, from the project's own Containerfiles and without a registry: their base is a Debian
# from where this machine's own apt has it, their Python packages come from where this machine's pip has them. What comes
# out is the store of a containerd that has them all, for nodes to begin with.
#
#   images.sh [DIRECTORY]             prints DIRECTORY/store when it holds the images of the tree as it is
#   images.sh --engine [DIRECTORY]    prints DIRECTORY when podman finds the worker's image with the settings that lie there
#
# DIRECTORY is ${SKYPROXY_CACHE:-~/.cache/skyproxy}/images by default; it takes five gigabytes. The first time takes about
# five minutes on two cores; a changed source takes one.
set -euo pipefail
shopt -s inherit_errexit

for_engine=
if [[ ${1:-} == --engine ]]; then
  for_engine=1
  shift
fi
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
# shellcheck source=tests/e2e/debian.sh
source "$here/../debian.sh"
tree=$(realpath "$here/../../..")
python=${PYTHON:-$tree/.venv/bin/python}
cache=${SKYPROXY_CACHE:-$HOME/.cache/skyproxy}
target=$(realpath -m "${1:-$cache/images}")
pause=$(realpath -m "$cache/kubernetes-1.20.2/bin/pause")
suite=bookworm
sources=(pyproject.toml README.md LICENSE requirements skyproxy skyproxy_server operator/skyproxy_operator manifests)
base=docker.io/library/python:3.12-slim-bookworm # as the Containerfiles name it
unset work builder

require() {
  local missing=() command commands=(mmdebstrap buildah flock runc)
  [[ -n $for_engine ]] || commands+=(containerd ctr)
  for command in "${commands[@]}"; do
    command -v "$command" >/dev/null || missing+=("$command")
  done
  if ((${#missing[@]})); then
    echo "building images needs ${missing[*]}. On Debian: apt-get install --no-install-recommends mmdebstrap buildah runc containerd" >&2
    exit 1
  fi
  require_mirror
  [[ -n $for_engine || -x $pause ]] || {
    echo "$pause is missing: run tests/e2e/control_plane/build.sh --node" >&2
    exit 1
  }
}

context() { # the sources as one archive that is the same for the same sources
  tar --create --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --exclude=__pycache__ --exclude='*.egg-info' \
    --directory "$tree" "${sources[@]}"
}

Buildah() { # Buildah COMMAND ARGUMENT...: with its storage and settings under the target
  local command=$1 options=()
  shift
  [[ $command != build && $command != push ]] || options=(--signature-policy="$target/policy.json")
  CONTAINERS_CONF=$target/containers.conf CONTAINERS_STORAGE_CONF=$target/storage.conf \
    CONTAINERS_REGISTRIES_CONF=$target/registries.conf BUILDAH_ISOLATION=chroot \
    buildah "$command" "${options[@]}" "$@"
}

configure() {
  cat >"$target/storage.conf" <<CONF
[storage]
driver = "overlay"
graphroot = "$target/layers"
runroot = "$target/layers.run"
CONF
  echo 'unqualified-search-registries = []' >"$target/registries.conf"
  echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$target/policy.json"
  printf '[network]\nnetwork_config_dir = "%s/networks"\n' "$target" >"$target/containers.conf"
}

configure_podman() { # what it builds finds packages where this machine does
  local folder volumes
  volumes="\"$target/pip.conf:/etc/pip.conf:ro\""
  while read -r folder; do volumes+=", \"$folder:$folder:ro\""; done < <("$python" "$here/pip_settings.py" "$target/pip.conf")
  # Podman would raise limits, which root may be forbidden, too; crun refuses control groups of both versions at once.
  cat >"$target/podman.conf" <<CONF
[network]
network_backend = "netavark"
network_config_dir = "$target/networks"
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
volumes = [$volumes]
CONF
}

make_base() {
  ! Buildah inspect --type image "$base" >/dev/null 2>&1 || return 0
  mmdebstrap --quiet --mode=root --variant=minbase --keyring="$keyring" --include=python3,python3-venv,ca-certificates \
    "$suite" "$work/base.tar" "$mirror"
  printf 'FROM scratch\nADD base.tar /\nRUN ln -sf python3 /usr/bin/python\nCMD ["python3"]\n' >"$work/Containerfile"
  Buildah build -f "$work/Containerfile" -t "$base" "$work"
}

build_image() { # build_image NAME: one of the project's own
  local volumes=() folder
  if [[ ! -d $work/context ]]; then
    mkdir "$work/context"
    context | tar --extract --directory "$work/context"
  fi
  while read -r folder; do volumes+=(-v "$folder:$folder:ro"); done < <("$python" "$here/pip_settings.py" "$work/pip.conf")
  volumes+=(-v "$work/pip.conf:/etc/pip.conf:ro")

  # The torch of the tests' environment, from where that one came.
  Buildah build --layers --network host --pull-never "${volumes[@]}" \
    --build-arg "TORCH=torch==$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')" \
    --build-arg "TORCH_INDEX=${TORCH_INDEX:-$("$python" -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)')}" \
    -f "$work/context/manifests/images/Containerfile.$1" -t "ghcr.io/skyproxy/$1:0.1.0" "$work/context"
}

make_images() { # one archive for each image under $work/images
  local image
  mkdir "$work/images"
  cp "$pause" "$work/pause"
  printf 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n' >"$work/Containerfile.pause"
  Buildah build --layers=false -f "$work/Containerfile.pause" -t skyproxy.local/pause:1 "$work"
  build_image operator
  build_image worker
  for image in skyproxy.local/pause:1 ghcr.io/skyproxy/operator:0.1.0 ghcr.io/skyproxy/worker:0.1.0; do
    Buildah push --quiet "$image" "docker-archive:$work/images/$(basename "${image%:*}").tar:$image"
    Buildah rmi "$image" >/dev/null # its layers are a gigabyte, and stay in the store below
  done
}

make_store() { # what a containerd has that was given the images
  local archive server
  rm -rf "$target/store" "$target/store.new"
  cat >"$work/containerd.toml" <<CONF
version = 2
root = "$target/store.new"
state = "$work/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$work/socket"
CONF
  containerd --config "$work/containerd.toml" &
  server=$!
  for _ in {1..300}; do
    ! ctr --address "$work/socket" version >/dev/null 2>&1 || break
    sleep 0.1
  done
  for archive in "$work"/images/*.tar; do
    ctr --address "$work/socket" --namespace k8s.io images import "$archive"
    rm "$archive"
  done
  # No GPU is here: what a Pod with GPUs runs is the same, but for its name.
  ctr --address "$work/socket" --namespace k8s.io images tag ghcr.io/skyproxy/worker:0.1.0 ghcr.io/skyproxy/worker:0.1.0-cuda
  kill "$server"
  wait "$server" || true
  mv "$target/store.new" "$target/store"
}

build() {
  configure
  make_base
  if [[ -n $for_engine ]]; then
    configure_podman
    build_image worker
  else
    make_images
    make_store
  fi
}

finish() { # ends the build with all that it started
  [[ -z ${builder:-} ]] || { kill -- "-$builder" && wait "$builder"; } 2>/dev/null || true
  [[ -z ${work:-} ]] || rm -rf "$work"
}

mkdir -p "$target"
# Two at once: the second waits here, then finds everything.
exec 9>"$target/.lock"
flock 9
# A change of how images are made, and not only of what they are made of, is another version.
key="1 $(context | sha256sum | cut -d' ' -f1)"
product=$target/store
[[ -z $for_engine ]] || product=$target

is_built() {
  [[ $(cat "$target/key$for_engine" 2>/dev/null) == "$key" && -d $product ]] || return 1
  # The store's build takes the engine's image away, which has the same name.
  [[ -z $for_engine ]] || Buildah inspect --type image ghcr.io/skyproxy/worker:0.1.0 >/dev/null 2>&1
}

if ! is_built; then
  require
  trap finish EXIT
  trap 'exit 130' INT TERM
  work=$(mktemp -d "$target/work.XXXXXX")
  echo "building images in $target; this takes minutes" >&2
  rm -f "$target/key$for_engine"
  set -m # in a group of its own
  build </dev/null >"$target/build.log" 2>&1 9>&- &
  builder=$!
  set +m
  if ! wait "$builder"; then
    echo "the build failed; the end of $target/build.log:" >&2
    tail -n 30 "$target/build.log" >&2
    exit 1
  fi
  unset builder
  echo "$key" >"$target/key$for_engine"
fi
echo "$product"
