#!/bin/sh
# Process 1 of the database guest, in the image that ../build-database makes: the guest agent, PostgreSQL, and a client that writes
# all the time. MariaDB and its client start when /etc/mysql/wanted exists, which a test makes. They print in the probes' protocol
# (README.md), with "disk" for the table: 00 is PostgreSQL's and 01 is MariaDB's. A count is printed when the server has
# acknowledged the commit of its row, as "N" by PostgreSQL's client and as "M" by MariaDB's. COLD is what is in the table when the
# server has started. A third client fills a table of MyISAM.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cluster=/etc/postgresql/17/main
mount -t tmpfs run /run
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
install -d -o postgres -g postgres /run/postgresql
install -d -o mysql -g mysql /run/mysqld

for port in /sys/class/virtio-ports/*; do
    grep -qx org.qemu.guest_agent.0 "$port/name" &&
        qemu-ga -d -m virtio-serial -p "/dev/${port##*/}" -t /run -f /run/agent.pid -l /run/agent.log
done

postgresql() { runuser -u postgres -- psql -XqAtw -d postgres 2>&1; }
maria() { mariadb --batch --unbuffered --skip-column-names "$@" lab 2>&1; }

log=/run/postgresql/log
runuser -u postgres -- /usr/lib/postgresql/17/bin/pg_ctl -D "$cluster" -l "$log" -w -t 1800 start >/dev/null ||
    echo "BAD PostgreSQL did not start"
sed 's/^/LOG /' "$log"
postgresql <<'SQL'
SELECT 'BAD rows are missing' FROM commits HAVING count(*) <> max(n);
SELECT 'COLD disk=00 last=' || lpad(to_hex(coalesce(max(n), 0)), 8, '0') FROM commits;
SQL

{
    until [ -e /etc/mysql/wanted ]; do sleep 1; done
    log=/run/mysqld/log
    mariadbd --user=mysql >"$log" 2>&1 &
    until mariadb-admin --silent ping >/dev/null 2>&1; do
        kill -0 $! || echo "BAD MariaDB did not start"
        sleep 1
    done
    sed 's/^/LOG /' "$log"
    maria <<'SQL'
SELECT 'BAD rows of MariaDB are missing' FROM commits HAVING count(*) <> max(n);
SELECT concat('COLD disk=01 last=', lower(lpad(hex(coalesce(max(n), 0)), 8, '0'))) FROM commits;
SQL
    while echo "INSERT INTO \`unsafe\` VALUES (NULL);"; do sleep 2; done | maria --force >/dev/null &
    while echo "INSERT INTO commits (n) SELECT coalesce(max(n), 0) + 1 FROM commits;" \
        "SELECT concat('M ', lower(lpad(hex(max(n)), 8, '0'))) FROM commits;"; do
        sleep 1
    done | maria
    echo "BAD the client of MariaDB ended"
} &
echo "INSERT INTO commits SELECT coalesce(max(n), 0) + 1 FROM commits RETURNING 'N ' || lpad(to_hex(n), 8, '0') \watch 0.5" | postgresql
echo "BAD the client of PostgreSQL ended"
while :; do sleep 1000; done
