#!/bin/sh
# mmdebstrap calls this with the root directory of the database guest: the last settings, then the image. DATABASE_IMAGE,
# PROBES and SCRIPTS come from ../build-database.
set -eu
root=$1

install -m 755 "$PROBES/database_init.sh" "$root/sbin/init"
# An emulated guest takes longer for everything.
mkdir "$root/etc/qemu/hooks"
sed 's/^LIMIT=5$/LIMIT=120/' "$SCRIPTS/postgresql-fsfreeze-hook" >"$root/etc/qemu/hooks/postgresql"
install "$SCRIPTS/mariadb-fsfreeze-hook" "$root/etc/qemu/hooks/mariadb"
cat >"$root/etc/qemu/fsfreeze-hook" <<'HOOK'
#!/bin/sh
/etc/qemu/hooks/postgresql "$1" && WAIT=120 HOLD=1800 exec /etc/qemu/hooks/mariadb "$1"
HOOK
chmod 755 "$root/etc/qemu/fsfreeze-hook" "$root"/etc/qemu/hooks/*
printf '[general]\nfsfreeze-hook = /etc/qemu/fsfreeze-hook\n' >"$root/etc/qemu/qemu-ga.conf"
install -m 755 "$SCRIPTS/postgresql-check" "$root/usr/local/sbin/"
cat >"$root/etc/postgresql/17/main/conf.d/guest.conf" <<'CONF'
# All that is about durability is as PostgreSQL and Debian have it.
listen_addresses = ''
shared_buffers = 16MB
max_connections = 10
autovacuum = off
jit = off
logging_collector = off
CONF
# pg_ctl looks for the configuration in the directory it is given.
chroot "$root" runuser -u postgres -- /usr/lib/postgresql/17/bin/postgres --single -D /etc/postgresql/17/main postgres <<'SQL'
CREATE TABLE commits (n bigint PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp());
SQL
cat >"$root/etc/mysql/mariadb.conf.d/guest.cnf" <<'CONF'
# All that is about durability is as MariaDB and Debian have it.
[mariadbd]
skip_networking
max_connections = 10
innodb_buffer_pool_size = 16M
innodb_log_file_size = 8M
key_buffer_size = 1M
aria_pagecache_buffer_size = 1M
CONF
# What the postinst of mariadb-server does; the server itself is in mariadb-server-core.
chroot "$root" useradd --system --home /nonexistent --shell /bin/false mysql
chroot "$root" mariadb-install-db --user=mysql --skip-test-db >/dev/null
chroot "$root" mariadbd --user=mysql --bootstrap 2>/dev/null <<'SQL'
CREATE DATABASE lab;
CREATE TABLE lab.commits (n BIGINT PRIMARY KEY, at TIMESTAMP(6) NOT NULL DEFAULT now(6)) ENGINE=InnoDB;
CREATE TABLE lab.unsafe (n BIGINT PRIMARY KEY AUTO_INCREMENT) ENGINE=MyISAM;
SQL
# Without JIT none of it is read; the rest is for building the image.
rm -rf "$root"/usr/lib/x86_64-linux-gnu/libLLVM* "$root"/usr/lib/postgresql/17/lib/bitcode "$root"/usr/lib/postgresql/17/lib/llvmjit* \
    "$root"/usr/share/i18n "$root"/usr/lib/x86_64-linux-gnu/perl/*/CORE \
    "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/etc/resolv.conf

# /proc, /sys and /dev are mounted in the root while hooks run; a plain bind mount shows it without them.
bare=$(mktemp -d)
trap 'umount "$bare"; rmdir "$bare"' EXIT
mount --bind "$root" "$bare"
mkfs.ext4 -q -m 0 -J size=8 -d "$bare" "$DATABASE_IMAGE" 768M
