#!/usr/bin/env bash
# The first process of a real node: containerd, kubelet and kube-proxy. Runs in new namespaces for processes, mounts,
# network, host name, IPC and control groups; when it ends, the kernel ends everything in them, Pods included.
#
#   node.sh NAME DIRECTORY BINARIES    DIRECTORY holds the configurations that nodes.py writes
#
# A line on standard input says that the network is made.
set -euo pipefail
name=$1 directory=$2 binaries=$3
read -r _

mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
# Control groups, of which this node sees its own part as the whole.
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
while IFS=: read -r _ controllers _; do
  [[ -n $controllers ]] || continue
  place=/sys/fs/cgroup/${controllers#name=}
  mkdir "$place"
  options=$controllers
  [[ $controllers != name=* ]] || options=none,$controllers
  mount -t cgroup -o "$options" cgroup "$place"
done </proc/self/cgroup

# What these programs write outside of their folders stays with the node.
mkdir -p "$directory"/{var,work,log}
mount -t tmpfs -o mode=755 tmpfs /run
mount -t overlay overlay -o "lowerdir=/var/lib,upperdir=$directory/var,workdir=$directory/work" /var/lib
mount --bind "$directory/log" /var/log
# Sysctls that hold for the whole machine: the kubelet wants these values, and would write them.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
  file=${setting%=*} file=$directory/sysctl-${file//\//-}
  echo "${setting#*=}" >"$file"
  mount --bind "$file" "/proc/sys/${setting%=*}"
done
# These are the network namespace's own.
echo 1 >/proc/sys/net/ipv4/ip_forward
[[ ! -e /proc/sys/net/bridge ]] || echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
# The kubelet shares the mounts of Pods with their containers.
mount --make-rshared /
hostname "$name"

containerd --config "$directory/containerd.toml" >>"$directory/containerd.log" 2>&1 &
for _ in {1..600}; do
  [[ ! -S /run/containerd.sock ]] || break
  sleep 0.1
done
"$binaries/kubelet" --config="$directory/kubelet.yaml" --kubeconfig="$directory/kubelet.kubeconfig" \
  --container-runtime=remote --container-runtime-endpoint=unix:///run/containerd.sock --hostname-override="$name" \
  --root-dir="$directory/kubelet" --cert-dir="$directory/kubelet-certificates" \
  --volume-plugin-dir="$directory/volume-plugins" --node-ip="$(cat "$directory/address")" --v=2 \
  >>"$directory/kubelet.log" 2>&1 &
"$binaries/kube-proxy" --config="$directory/kube-proxy.yaml" >>"$directory/kube-proxy.log" 2>&1 &
# None of the three ends by itself.
wait -n
exit 1
