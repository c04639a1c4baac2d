"""``undo.sh``, the script in a safety copy that undoes the restore without snaporch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from snaporch.bundle.firmware_files import trusted_directory
from snaporch.bundle.manifest import Manifest, SnapshotEntry
from snaporch.catalog.keep import KEPT
from snaporch.catalog.safety_copy_holds import UNDO_HOLD
from snaporch.default_paths import BARRED_DISK
from snaporch.errors import one_line
from snaporch.restore.journal import HOLD
from snaporch.restore.safety_catalog import HALF_WAY, MANAGED_SAVE, RAM, UNDONE, SafetyCopy
from snaporch.zfs.resolver import HOST, SERVED_FILE_SYSTEMS

TPM_PREFIX = "tpm."
"""The prefix of the names of TPM state files in a safety copy."""

_HEAD = r"""#!/bin/sh
# Undoes a restore by snaporch: brings the disks back to what they were before it.
# The guest must be off. What was written since the restore is lost.
# After an interruption it can be run again; after it has ended it refuses.
# It makes all checks first: if one fails, nothing is touched.
set -eu
cd "$(dirname "$0")"
who=@WHO@
die() { echo "$who: $*; nothing was touched" >&2; exit 5; }
also='' only='' again=''
for option; do
    case $option in
    --also-roll-back) also=yes ;;
    --disks-only) only=yes ;;
    --again) again=yes ;;
    *) die "usage: $0 [--also-roll-back] [--disks-only] [--again]" ;;
    esac
done

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

is_there() { # SNAPSHOT GUID: this snapshot exists
    [ "$(zfs get -Hpo value guid "$1" 2>/dev/null)" = "$2" ]
}

once() { # WHAT JOURNAL LAST-SNAPSHOT GUID...: what was undone is not undone a second time
    [ -z "$again" ] || return 0
    what=$1 journal=$2
    shift 2
    if [ ! -e @UNDONE@ ]; then
        # of an unfinished restore, or of an interrupted run of this script
        [ -z "$barred" ] && [ ! -e "$journal" ] || return 0
        while [ $# -gt 0 ]; do # the last snapshot of each dataset came with its streams
            is_there "$1" "$2" || return 0
            shift 2
        done
    fi
    die "$what was undone already, and what was written since would be lost;" \
        "if it may be: sh $PWD/undo.sh --again"
}

check() { # SNAPSHOT GUID BYTES-TO-RECEIVE DEVICE-OF-A-VOLUME FILE-OF-THE-GUEST...
    dataset=${1%@*}
    is_there "$1" "$2" ||
        die "$1 is missing, or is another snapshot of that name"
    born=$(zfs get -Hpo value createtxg "$1")
    stuck=$(newer '$3 != "" && $3 != "-"'
        newer '$5 != "" && $5 != "-"'
        newer '$2 != "0" && $2 != "-"' |
            while read -r name; do zfs holds -H "$name" || echo "$name"; done |
            awk -F'\t' '$2 !~ /^(@OWN_HOLDS@)$/ { print $1 }')
    [ -z "$stuck" ] || die "kept, held or cloned, and would have to be destroyed:" $stuck
    free=$(zfs get -Hpo value available "$dataset")
    written=$(zfs get -Hpo value "written@${1#*@}" "$dataset")
    [ $((free + written)) -ge "$3" ] || die "$dataset has no room for $3 bytes"
    case $(zfs get -Hpo value type "$dataset") in
    volume)
        node=$(readlink -e "$4") || die "$4 does not exist"
        [ -d "/sys/class/block/${node##*/}" ] || die "the users of $4 are unknown"
        seen=$(devices "$node" | xargs -d '\n' stat -c 'b %t:%T')
        holder=$(devices "$node" | while read -r node; do holders "$node"; done | paste -sd,)
        [ -z "$holder" ] || die "$dataset would be rolled back, and this host uses it: $holder" ;;
    *) if mount=$(findmnt -nfo TARGET -t zfs -S "$dataset"); then
            seen="f $(stat -c %d "$mount")"
        else
            [ -n "$also" ] || die "$dataset is not mounted, so it is unknown whether others" \
                "have written to it; zfs mount -l $dataset, or use --also-roll-back"
            return 0
        fi ;;
    esac
    user=$(used | seen="$seen" awk '
        BEGIN { split(ENVIRON["seen"], lines, "\n"); for (i in lines) wanted[lines[i]] }
        ($1 " " $2) in wanted { print $3; exit }')
    [ -z "$user" ] || die "$dataset is in use: $user"
    if [ -n "$also" ] || [ "${seen#b}" != "$seen" ]; then return 0; fi
    check_others "$mount" "$@"
}

same() { # FILE SIZE INODE TIME: a backing file that is not in the copy has not changed
    [ -z "$only" ] || return 0
    [ "$(stat -Lc '%s %i %.9Y' -- "$1")" = "$2 $3 $4" ] ||
        die "$1, which lies beneath a disk and is not in the copy, was changed since;" \
            "put it back as it was, or use --disks-only"
}

devices() { # DEVICE: print it and its partitions
    echo "$1"
    find "/sys/class/block/${1##*/}/" -mindepth 2 -maxdepth 2 -name partition -printf '%h\n' |
        sed "s,.*/,${1%/*}/,"
}

holders() { # DEVICE: print what on this host uses it
    ls "/sys/class/block/${1##*/}/holders"
    number=$(cat "/sys/class/block/${1##*/}/dev")
    find /proc/[0-9]*/mountinfo -exec cat {} + 2>/dev/null |
        awk -v number="$number" '
            { for (i = 7; i < NF && $i != "-"; i++); source = $(i + 2) }
            $3 == number { print "this", $5; next } # btrfs has a number of its own
            source ~ /^\// { print source, $5 }' | LC_ALL=C sort -u |
        while read -r source place; do
            [ "$source" = this ] || [ "$(readlink -e -- "$source")" = "$1" ] || continue
            echo "a mount at $place"
            break
        done
    [ ! -e /proc/swaps ] || awk -v node="$1" '$1 == node { print "swap" }' /proc/swaps
    zpool list -vHLP 2>/dev/null | awk -v node="$1" '$1 == node { print "a pool" }'
}

newer() { # CONDITION: print the dataset's snapshots born after $born for which it is true
    zfs list -Hpo createtxg,userrefs,clones,name,@KEPT@ -t snapshot -d 1 "$dataset" |
        awk -F'\t' -v born="$born" "\$1 > born && ($1) { print \$4 }"
}

release_newer() { # SNAPSHOT: release snaporch's own holds on newer snapshots
    dataset=${1%@*} born=$(zfs get -Hpo value createtxg "$1")
    newer '$2 != "0" && $2 != "-"' | while read -r name; do
        for tag in @TAGS@; do zfs release "$tag" "$name" 2>/dev/null || true; done
    done
}

sound() { # DIRECTORY NAME: the path has no link, and NAME is not a directory
    [ "$(realpath -m -- "$1")" = "$1" ] || die "a link is on the way to $1"
    [ ! -d "$1/$2" ] || [ -L "$1/$2" ] || die "$1/$2 is a directory"
}

put() { # FILE DIRECTORY NAME: copy; an emulator may own the directory and its parents
    sound "$2" "$3"
    mkdir -p -- "$2"
    (
        kept=$PWD
        cd -P -- "$2"
        [ "$(pwd -P)" = "$2" ] || die "a link is on the way to $2"
        cp -p --remove-destination -T -- "$kept/$1" "./$3"
    )
}

check_others() { # MOUNT-POINT, and the arguments of check
    mount=$1 snapshot=${2#*@}
    shift 5
    others "$mount" "$@" >"$work/now" || die "$dataset cannot be examined"
    : >"$work/then"
    [ ! -s "$work/now" ] || before >"$work/then" || true
    LC_ALL=C sort -zo "$work/now" "$work/now"
    LC_ALL=C sort -zo "$work/then" "$work/then"
    LC_ALL=C comm -z -23 "$work/now" "$work/then" >"$work/new"
    count=$(tr -cd '\0' <"$work/new" | wc -c)
    some=$(cut -zd' ' -f3- "$work/new" | LC_ALL=C sort -z | head -zn 3 | tr '\0' '\n' | paste -sd,)
    [ "$count" = 0 ] || die "$dataset would be rolled back with $count files that are not the" \
        "guest's: $some; move them away, or use --also-roll-back"
}

before() { # print the snapshot's files, by a mount that no guest's namespace inherits
    mkdir -p "$work/root"
    unshare --mount sh -ec 'mount -t zfs -o ro "$1" "$2"; cd "$2"
        find . -xdev ! -type d ! -type s ! -type p -printf "%i %s,%T@ %P\0"' \
        sh "$dataset@$snapshot" "$work/root"
}

others() ( # DIRECTORY FILE-OF-THE-GUEST...: print "INODE SIZE,TIME PATH" of each other file
    cd "$1"
    shift
    for own; do
        shift
        for file in "$own" "$own"/*; do
            if [ -f "$file" ] || [ -L "$file" ]; then set -- "$@" ! -samefile "$file"; fi
        done
    done
    find . -xdev -path ./.zfs -prune -o ! -type d ! -type s ! -type p "$@" -printf '%i %s,%T@ %P\0'
)

used() { # print what every process has open: "f DEVICE PATH" or "b DEVICE PATH"
    { # files on network and FUSE mounts are left out: their server may never answer
        find /proc/[0-9]*/mountinfo -exec grep -H . {} + || true # a process may have ended
        find /proc/[0-9]*/fdinfo -type f -exec grep -H '^mnt_id:' {} +
    } 2>/dev/null | awk '
        { split($1, place, /[\/:]/) }
        place[4] == "mountinfo" {
            for (i = 7; i < NF && $i != "-"; i++);
            if ($(i + 1) ~ /^(@ANSWERED_FOR@)$/) away[place[3], place[5]]
            next
        }
        !((place[3], $2) in away) { print "/proc/" place[3] "/fd/" place[5] }' |
        xargs -r stat -Lc '%F|%d|%t:%T|%n' 2>/dev/null |
        awk -F'|' '$1 == "block special file" { print "b", $3, $4; next } { print "f", $2, $4 }'
    for file in /sys/block/loop*/loop/backing_file; do # no process has their backing files open
        [ -e "$file" ] || continue
        loop=${file%/loop/*}
        timeout 10 stat -L --printf "f %d $loop\nb %t:%T $loop\n" -- "$(cat "$file")" \
            2>/dev/null || true
    done
}

"""


def undo_script(
    copy: SafetyCopy, *, own: Mapping[str, Sequence[str]], uri: str, journal: Path, lock: Path
) -> str:
    """Return the text of ``undo.sh`` for a safety copy that is otherwise complete.

    Args:
        own: for each dataset the guest's files in it; other files are not rolled back silently.
        uri: of libvirt.
        journal: of the restore; deleted when the disks are back, if the restore is unfinished,
            with the RAM image that it made.
        lock: of the domain, so that no snaporch works on the domain meanwhile.
    """
    readers = lock.with_name(f"{copy.manifest.uuid}.readers.lock")
    manifest, there = copy.manifest, {path.name for path in copy.directory.iterdir()}
    lines = [
        f"export LIBVIRT_DEFAULT_URI={shlex.quote(uri)}",
        f"mkdir -p -m 700 {shlex.quote(str(lock.parent))}",
        f"exec 9>>{shlex.quote(str(lock))}",
        'flock -n 9 || { echo "$who: snaporch is working on the guest" >&2; exit 6; }',
        f"exec 8>>{shlex.quote(str(readers))}",
        'flock -n 8 || { echo "$who: a snapshot of the guest is being read" >&2; exit 6; }',
        "# also a domain that was not defined: the restore or the admin may have defined it",
        'known=$(virsh list --all --uuid) || die "libvirt does not answer"',
        "barred='' info=''",
        f'case "$known" in *{manifest.uuid}*)',
        f"    xml=$(virsh dumpxml --inactive {manifest.uuid}) ||",
        '        die "libvirt does not report the definition of the guest"',
        f'    case "$xml" in *"{BARRED_DISK}"*) barred=yes ;; esac ;;',
        "esac",
        _once(copy, journal),
        f'case "$known" in *{manifest.uuid}*)',
        f"    state=$(LC_ALL=C virsh domstate {manifest.uuid}) &&",
        f"        info=$(LC_ALL=C virsh dominfo {manifest.uuid}) ||",
        '        die "libvirt does not report the state of the guest"',
        '    case "$state" in "shut off"* | crashed*) ;; *)',
        '        die "the guest is $state; shut it off first" ;;',
        "    esac ;;",
        "esac",
    ]
    lines += [_check(copy, target, own.get(target.dataset, ())) for target in manifest.snapshots]
    lines += _beneath(manifest, resumes=RAM in there)
    files = _files(manifest)
    lines += [shlex.join(["sound", place, name]) for _, place, name in files]
    lines.append(f"rm -f {UNDONE}")
    if "barred.xml" in there:
        lines += [
            "# so that the guest cannot be started before all disks are back",
            "virsh define barred.xml",
        ]
    lines += [
        "# a start would resume RAM that is newer than the disks",
        'case "$info" in *"Managed save:"*yes*)',
        f"    virsh managedsave-remove {manifest.uuid} ;;",
        "esac",
    ]
    for target in manifest.snapshots:
        name = shlex.quote(f"{target.dataset}@{target.name}")
        lines += [f"release_newer {name}", f"zfs rollback -r {name}"]
        lines.append(f"zfs release {HOLD} {name} 2>/dev/null || true")
    for kept in copy.record.kept:
        lines += [f"zfs receive -F {shlex.quote(kept.dataset)} < {name}" for name in kept.streams]
        for name, properties in kept.properties.items():
            pairs = [f"{key}={value}" for key, value in properties.items()]
            lines.append(shlex.join(["zfs", "set", *pairs, name]))
        lines += [shlex.join(["zfs", "bookmark", of, name]) for name, of in kept.bookmarks.items()]
    lines += [shlex.join(["put", *words]) for words in files]
    lines.append(f"rm -f {shlex.quote(str(journal))}")
    lines.append(shlex.join(["rm", "-rf", f"../.{manifest.run}.partial"]) + " || true")  # its RAM
    if "domain.xml" in there:
        lines.append("virsh define domain.xml")
    lines.append(f"touch {UNDONE} && sync {UNDONE} .")
    if RAM in there:
        lines += _resume(manifest)
    if MANAGED_SAVE in there:
        lines.append(
            f'echo "its managed save image: virsh restore --bypass-cache $PWD/{MANAGED_SAVE}"'
        )
    lines += [
        f"state=$(LC_ALL=C virsh domstate {manifest.uuid} 2>/dev/null) || state=unknown",
        f'echo {shlex.quote(copy.thing)} "was undone; state of the guest: $state"',
    ]
    return _head(manifest) + "\n".join(lines) + "\n"


def _head(manifest: Manifest) -> str:
    own = (HOLD, UNDO_HOLD)
    head = _HEAD.replace("@ANSWERED_FOR@", SERVED_FILE_SYSTEMS).replace("@KEPT@", KEPT)
    head = head.replace("@UNDONE@", UNDONE)
    head = head.replace("@OWN_HOLDS@", "|".join(own)).replace("@TAGS@", " ".join(own))
    return head.replace("@WHO@", shlex.quote(one_line(f"undo.sh: {manifest.domain}")))


def _resume(manifest: Manifest) -> list[str]:
    """Resume the RAM, unless a disk is not in the copy: the guest would corrupt that disk."""
    if others := ", ".join(disk.target for disk in manifest.disks if disk.is_apart):
        text = f"the guest stays off: its RAM is not resumed over {others}, not rolled back with it"
        return [f"echo {shlex.quote(text)}"]
    return [
        "# the guest goes on as it was; QEMU 11 loads RAM through libvirt's helper only",
        f'[ -n "$only" ] || virsh restore --bypass-cache "$PWD/{RAM}" || {{',
        '    echo "$who: the disks are back, but the RAM was not resumed;" \\',
        '        "start it, or try again:" \\',
        f'        "virsh restore --bypass-cache $PWD/{RAM}" >&2',
        "    exit 9",
        "}",
    ]


def _once(copy: SafetyCopy, journal: Path) -> str:
    """Refuse if every dataset has its last snapshot back, and no run has to be finished."""
    last = [word for e in copy.record.last for word in (f"{e.dataset}@{e.name}", str(e.guid))]
    return shlex.join(["once", copy.thing, str(journal), *last])


def _beneath(manifest: Manifest, *, resumes: bool) -> list[str]:
    """Check backing files that are not in the copy; RAM needs the recorded state of all of them."""
    lines = []
    for file in (file for disk in manifest.disks for file in disk.beneath or ()):
        if file.is_unknown and resumes:
            reason = "may have been changed since: its former state is unknown"
            text = f"{file.path} {reason}; use --disks-only"
            lines.append(f'[ -n "$only" ] || die {shlex.quote(text)}')
        elif file.dataset is None and not file.is_unknown:
            seconds, rest = divmod(file.mtime_ns or 0, 10**9)
            facts = (file.path, str(file.bytes), str(file.inode), f"{seconds}.{rest:09}")
            lines.append(shlex.join(["same", *facts]))
    return lines


def refusing_script(copy: SafetyCopy) -> str:
    """Return the script of a safety copy whose disks are of two instants: it only refuses."""
    return f"{_head(copy.manifest)}die {shlex.quote(f'{copy.name} {HALF_WAY}; {copy.way_out}')}\n"


def _check(copy: SafetyCopy, target: SnapshotEntry, guests: Sequence[str]) -> str:
    name, size = f"{target.dataset}@{target.name}", copy.size(target.dataset)
    node = str(HOST.volume_link(target.dataset))
    return shlex.join(["check", name, str(target.guid), str(size), node, *guests])


def _files(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return each kept file with the directory and the name to which it is put back."""
    places = [(part.name, Path(part.source)) for part in manifest.parts if part.source is not None]
    return [(name, _real(place.parent), place.name) for name, place in places]


def _real(directory: Path) -> str:
    """Resolve the links in the path; they belonged to root when the file was read."""
    with trusted_directory(directory) as descriptor:
        return os.readlink(f"/proc/self/fd/{descriptor}")
