#!/usr/bin/env bash
# Podman without root, for a test that root runs: as a user of its own, whom only the processes that this starts know.
#
#   podman_as_user.sh DIRECTORY ARGUMENT...    runs podman with them; DIRECTORY is the user's home, readable on the way to it
#
# The user, its subordinate ids and devices that anybody may open exist in a mount namespace only; the machine's own files stay as
# they are. Variables of the caller are the user's, too, but for the place of settings and storage.
set -euo pipefail

home=$(realpath "$1")
if [[ ${2:-} != --inside ]]; then
  exec unshare --mount --propagation=slave "$0" "$home" --inside "${@:2}"
fi
shift 2
user=12345 # no user of the machine: its number is in the copy of /etc/passwd only

prepare() {
  local device
  mkdir -p "$home"/{etc,dev,run,layers}
  { cat /etc/passwd; echo "skyproxy-rootless:x:$user:$user::$home:/bin/sh"; } >"$home/etc/passwd"
  echo "$user:200000:65536" >"$home/etc/subids"
  mknod -m 666 "$home/dev/tun" c 10 200
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' "$home/layers" "$home/run/layers" >"$home/storage.conf"
  cat >"$home/containers.conf" <<CONF
[network]
network_backend = "netavark"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
CONF
  chown "$user:$user" "$home" "$home"/{run,layers}
  chmod 711 "$home"
  chmod 700 "$home/run"
}

[[ -d $home/layers ]] || prepare
mount --bind "$home/etc/passwd" /etc/passwd
for file in /etc/subuid /etc/subgid; do
  mount --bind "$home/etc/subids" "$file"
done
mount --bind "$home/dev/tun" /dev/net/tun
export HOME=$home XDG_RUNTIME_DIR=$home/run CONTAINERS_CONF=$home/containers.conf CONTAINERS_STORAGE_CONF=$home/storage.conf
unset XDG_CONFIG_HOME XDG_DATA_HOME CONTAINERS_REGISTRIES_CONF
cd "$home"
exec setpriv --reuid "$user" --regid "$user" --clear-groups -- podman "$@"
