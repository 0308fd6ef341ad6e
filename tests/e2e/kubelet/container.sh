#!/bin/sh
# Makes the root file system of one container, then becomes its first process. Runs in new mount, pid, ipc and uts
# namespaces; the environment is already the container's, so it is never in an argument.
#
#   container.sh SCRATCH HOSTNAME READ_ONLY DIRECTORY MOUNTS COMMAND...
#
# The root is an overlay over this machine's: what "the image" holds. MOUNTS is a file of lines "MODE SOURCE TARGET",
# separated by tabs; MODE is rw, ro, or mask for a TARGET that the container may not see. Standard input is a pipe that is
# written to when all is made.
set -eu
container_path=$PATH
PATH=/usr/sbin:/usr/bin:/sbin:/bin
scratch=$1 name=$2 read_only=$3 directory=$4 mounts=$5
shift 5

mount --make-rprivate /
mount -t tmpfs tmpfs "$scratch"
root=$scratch/root
mkdir "$scratch/upper" "$scratch/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
hostname "$name"

tab=$(printf '\t')
while IFS=$tab read -r mode source target; do
  if [ "$mode" = mask ]; then
    [ ! -d "$root$target" ] || mount -t tmpfs -o ro tmpfs "$root$target"
    continue
  fi
  if [ -d "$source" ]; then
    chroot "$root" mkdir -p "$target"
  else
    chroot "$root" mkdir -p "${target%/*}"
    chroot "$root" touch "$target"
  fi
  # Links in the path, such as /var/run, are the container's.
  place=$root$(chroot "$root" realpath "$target")
  mount --bind "$source" "$place"
  [ "$mode" = rw ] || mount -o remount,bind,ro "$place"
done <"$mounts"
[ "$read_only" = no ] || mount -o remount,ro "$root"

echo >&0
exec </dev/null
PATH=$container_path
export PATH
exec /usr/sbin/chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$directory" "$@"
