#!/bin/sh
# Process 1 of the database guest, in the image that ../build-database makes: the guest agent, PostgreSQL, and a client that
# writes all the time. The client prints in the probes' protocol (README.md), with "disk" for the table: a count is printed when
# PostgreSQL has acknowledged the commit of its row, and COLD is what is in the table at power-on.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cluster=/etc/postgresql/17/main
mount -t tmpfs run /run
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
install -d -o postgres -g postgres /run/postgresql

for port in /sys/class/virtio-ports/*; do
    grep -qx org.qemu.guest_agent.0 "$port/name" &&
        qemu-ga -d -m virtio-serial -p "/dev/${port##*/}" -t /run -f /run/agent.pid -l /run/agent.log
done

log=/run/postgresql/log
runuser -u postgres -- /usr/lib/postgresql/17/bin/pg_ctl -D "$cluster" -l "$log" -w -t 1800 start >/dev/null ||
    echo "BAD PostgreSQL did not start"
sed 's/^/LOG /' "$log"
runuser -u postgres -- psql -XqAtw -d postgres <<'SQL' 2>&1
SELECT 'BAD rows are missing' FROM commits HAVING count(*) <> max(n);
SELECT 'COLD disk=00 last=' || lpad(to_hex(coalesce(max(n), 0)), 8, '0') FROM commits;
INSERT INTO commits SELECT coalesce(max(n), 0) + 1 FROM commits RETURNING 'N ' || lpad(to_hex(n), 8, '0') \watch 0.1
SQL
echo "BAD the client ended"
while :; do sleep 1000; done
