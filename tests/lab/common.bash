# shellcheck shell=bash disable=SC2034
# Shared by the build stages: where things are, private apt, one line per step.

lab_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/snaporch/lab
# mkfs.ext4 and debugfs live in sbin, which a plain user's PATH may lack.
PATH=$PATH:/usr/sbin:/sbin
export LC_ALL=C.UTF-8

# The suites the root and the kernel come from.
suite=trixie
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

die() {
    printf 'lab: %s\n' "$*" >&2
    exit 1
}

# packages FILE: the names in a package list, comments dropped.
packages() {
    sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$1"
}

# step LOG TITLE COMMAND...: run quietly, then print one line with the time.
step() {
    local log=$1 title=$2 from=$EPOCHREALTIME status=0
    shift 2
    # Not "|| status=$?": that would switch errexit off inside the command.
    set +e
    (set -e; "$@") >>"$log" 2>&1 </dev/null
    status=$?
    set -e
    if ((status)); then
        die "failed: $title (log: $log)"
    fi
    awk -v t="$title" -v a="$from" -v b="$EPOCHREALTIME" \
        'BEGIN { printf "lab: %-52s %7.1f s\n", t, b - a }'
}

# host_mirror: the URI the host's own sources give for its Debian release.
# apt answers for one-line and deb822 sources alike.
host_mirror() {
    local codename
    codename=$(. /etc/os-release && printf %s "${VERSION_CODENAME:-}")
    # shellcheck disable=SC2016 # apt's own $(FIELD)
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' \
        'Created-By: Packages' 2>/dev/null |
        awk -v c="$codename" '
            $3 != "main" { next }
            $2 == c { print $1; found = 1; exit }
            $2 ~ /^(stable|testing|unstable|sid)$/ && !other { other = $1 }
            END { if (!found && other) print other }'
}

# apt_setup DIR: a private apt in DIR; the host's lists and sources stay as
# they are, its transport settings (proxies, certificates) still apply.
apt_setup() {
    local dir=$1 mirror
    mirror=$(host_mirror)
    [[ -n $mirror ]] || die "no Debian mirror in this host's apt sources"
    mkdir -p "$dir"/{lists/partial,archives/partial}
    : >"$dir/status"
    printf 'deb [signed-by=%s] %s %s main contrib\n' \
        "$keyring" "$mirror" "$suite" \
        "$keyring" "$mirror" "$suite-backports" >"$dir/sources.list"
    cat >"$dir/apt.conf" <<EOF
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::lists "$dir/lists";
Dir::State::status "$dir/status";
Dir::Cache "$dir";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Sandbox::User "";
EOF
    export APT_CONFIG=$dir/apt.conf
}

# candidate PACKAGE: the version the private apt would install.
candidate() {
    apt-cache policy "$1" | awk '$1 == "Candidate:" { print $2 }'
}
