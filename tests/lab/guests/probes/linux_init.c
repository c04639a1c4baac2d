/*
 * Linux probe: the promise and protocol of README.md as process 1 of an initramfs.
 *
 * Counts go to every /dev/vdX past the page cache.  Besides:
 *
 * - the first disk's first partition (ext4, at 1 MiB; LBA 1 and 2 are before it) is mounted on /mnt, and every count is
 *   also written, lazily, to /mnt/count: a guest whose file system is frozen stops counting, and a quiesced snapshot
 *   holds the count although nobody synced it.  At power-on "FILE 0000002a" tells what was found there;
 * - memory is kept dirty by a thread, which verifies every page before it writes it again;
 * - another thread watches the clock: "GAP 123" every 16 counts; with it "WROTE 456" is how many pages were written again;
 * - the guest agent answers, or does not.
 *
 * Kernel command line: interval_ms= between counts (55), dirty_mib= (0), dirty_rate= pages a second (1000; 0: as fast
 * as it can), noise= percent of each of these pages that cannot be compressed (100), agent=running, stopped (the
 * channel is open, nobody answers) or none, root= a disk with a system of its own, which is started instead of all this.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DISKS = 26, SECTOR = 512, COUNT_OFFSET = SECTOR, PAGE = 4096, GAP_EVERY = 16 };

struct sector {
    char magic[8];
    uint32_t count, complement, disk, filler[123];
};

struct page {
    uint32_t number, round, filler[PAGE / 4 - 2];
};

static int disks[MAX_DISKS];
static unsigned disk_count;
static uint32_t count;
static struct sector *ours, *seen; /* two each, by parity of the count */
static int count_file = -1;
static char command_line[2048];
static _Atomic uint64_t longest_gap;
static unsigned noise_words;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* One write for a line, so that lines of different threads do not mix. */
static void say(const char *format, ...)
{
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (write(STDOUT_FILENO, line, (size_t)length) < 0)
        return; /* nobody to tell */
}

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void rest(uint64_t nanoseconds)
{
    struct timespec t = {(time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
        ;
}

/* The value of NAME= on the kernel command line, up to the next space. */
static const char *option(const char *name, const char *otherwise)
{
    static char value[64];
    const char *place = command_line;
    size_t length = strlen(name);

    while ((place = strstr(place, name))) {
        if ((place == command_line || place[-1] == ' ') && place[length] == '=') {
            snprintf(value, sizeof value, "%.*s", (int)strcspn(place + length + 1, " \n"), place + length + 1);
            return value;
        }
        place += length;
    }
    return otherwise;
}

static unsigned long number(const char *name, const char *otherwise)
{
    return strtoul(option(name, otherwise), 0, 10);
}

static ssize_t read_file(const char *path, char *to, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    ssize_t length = read(file, to, size - 1);
    close(file);
    if (length >= 0)
        to[length] = 0;
    return length;
}

/* -- disks ------------------------------------------------------------------------------------------------------- */

static void compose_one(uint32_t value, uint32_t disk)
{
    struct sector *s = &ours[value & 1];
    memcpy(s->magic, "SNAPORCH", 8);
    s->count = value;
    s->complement = ~value;
    s->disk = disk;
    for (unsigned i = 0; i < 123; i++)
        s->filler[i] = value;
}

static void compose(uint32_t disk)
{
    compose_one(count, disk);
    compose_one(count - 1, disk);
}

static int read_disk(unsigned disk)
{
    return pread(disks[disk], seen, 2 * SECTOR, COUNT_OFFSET) == 2 * SECTOR;
}

/* A failure shows when the sectors are read back. */
static void write_disk(unsigned disk)
{
    off_t offset = COUNT_OFFSET + (off_t)(count & 1) * SECTOR;
    compose(disk);
    if (pwrite(disks[disk], &ours[count & 1], SECTOR, offset) != SECTOR)
        say("BAD disk=%02x write: %s\n", disk, strerror(errno));
}

static void check_disk(unsigned disk)
{
    compose(disk);
    if (read_disk(disk) && !memcmp(ours, seen, 2 * SECTOR))
        return;
    say("BAD disk=%02x want=%08" PRIx32 " got=%08" PRIx32 " prev=%08" PRIx32 "\n", disk, count, seen[count & 1].count,
        seen[~count & 1].count);
}

/* Says which count was found and starts anew from none. */
static void cold_disk(unsigned disk)
{
    uint32_t last = 0;
    if (read_disk(disk))
        for (unsigned i = 0; i < 2; i++)
            if (!memcmp(seen[i].magic, "SNAPORCH", 8) && seen[i].count > last)
                last = seen[i].count;
    say("COLD disk=%02x last=%08" PRIx32 "\n", disk, last);
    write_disk(disk);
}

static void each_disk(void (*action)(unsigned))
{
    for (unsigned disk = 0; disk < disk_count; disk++)
        action(disk);
}

static void open_disks(void)
{
    char path[] = "/dev/vda";
    for (; disk_count < MAX_DISKS; disk_count++, path[7]++) {
        disks[disk_count] = open(path, O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC);
        if (disks[disk_count] < 0)
            break;
    }
    if (!disk_count)
        say("BAD no disk\n");
}

/* -- the file system --------------------------------------------------------------------------------------------- */

static void open_file(void)
{
    uint32_t found = 0;
    if (mount("/dev/vda1", "/mnt", "ext4", 0, 0)) {
        say("BAD mount: %s\n", strerror(errno));
        return;
    }
    count_file = open("/mnt/count", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (count_file < 0 || pread(count_file, &found, sizeof found, 0) < 0)
        say("BAD file: %s\n", strerror(errno));
    say("FILE %08" PRIx32 "\n", found);
}

static void write_to_file(void)
{
    if (count_file >= 0 && pwrite(count_file, &count, sizeof count, 0) != sizeof count)
        say("BAD file: %s\n", strerror(errno));
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* Fills a page with what tells it from all others, and noise that cannot be compressed. */
static void fill(struct page *page, uint32_t index, uint32_t round)
{
    uint32_t x = (index * 2654435761u) ^ (round * 40503u) ^ 0x9e3779b9u;
    page->number = index;
    page->round = round;
    for (unsigned i = 0; i < noise_words; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        page->filler[i] = x;
    }
    for (unsigned i = noise_words; i < PAGE / 4 - 2; i++)
        page->filler[i] = i;
}

static volatile uint64_t rewritten;

static void *dirty(void *unused)
{
    uint32_t pages = (uint32_t)number("dirty_mib", "0") * 256, rate = (uint32_t)number("dirty_rate", "1000");
    struct page *memory = mmap(0, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct page wanted;

    (void)unused;
    noise_words = (PAGE / 4 - 2) * (unsigned)number("noise", "100") / 100;
    if (memory == MAP_FAILED) {
        say("BAD dirty_mib: %s\n", strerror(errno));
        return 0;
    }
    for (uint32_t i = 0; i < pages; i++)
        fill(&memory[i], i, 0);
    say("DIRTY %u pages\n", pages);
    for (uint32_t round = 1;; round++) {
        for (uint32_t i = 0; i < pages; i++) {
            fill(&wanted, i, round - 1);
            if (memcmp(&memory[i], &wanted, PAGE))
                say("BAD page=%08" PRIx32 " want=%08" PRIx32 " got=%08" PRIx32 "\n", i, round - 1, memory[i].round);
            fill(&memory[i], i, round);
            rewritten++;
            /* A hundredth of a second's worth at a time. */
            if (rate && (rate < 100 || i % (rate / 100) == 0))
                rest(rate < 100 ? 1000000000 / rate : 10000000);
        }
    }
}

/* -- the clock ------------------------------------------------------------------------------------------------------ */

static void *watch_clock(void *unused)
{
    (void)unused;
    for (uint64_t last = now();;) {
        rest(1000000);
        uint64_t time = now();
        if (time - last > longest_gap)
            longest_gap = time - last;
        last = time;
    }
    return 0;
}

/* -- the agent ------------------------------------------------------------------------------------------------------ */

/* The device of the agent's channel, where udev would make a link. */
static int find_port(char *device, size_t size)
{
    const char *root = "/sys/class/virtio-ports";
    DIR *ports = opendir(root);
    struct dirent *entry;
    int found = 0;

    while (ports && !found && (entry = readdir(ports))) {
        char path[512], name[64];
        snprintf(path, sizeof path, "%s/%s/name", root, entry->d_name);
        if (read_file(path, name, sizeof name) > 0 && !strcmp(name, "org.qemu.guest_agent.0\n")) {
            snprintf(device, size, "/dev/%s", entry->d_name);
            found = 1;
        }
    }
    if (ports)
        closedir(ports);
    return found;
}

static void start_agent(void)
{
    char device[300];
    const char *mode = option("agent", "running");

    if (!strcmp(mode, "none"))
        return;
    if (!find_port(device, sizeof device)) {
        say("AGENT no channel\n");
        return;
    }
    if (!strcmp(mode, "stopped")) {
        if (open(device, O_RDWR | O_CLOEXEC) < 0) /* for ever, and never read */
            say("BAD agent channel: %s\n", strerror(errno));
        return;
    }
    if (!fork()) {
        int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd < 3; fd++)
            dup2(null, fd);
        signal(SIGCHLD, SIG_DFL);
        execl("/usr/sbin/qemu-ga", "qemu-ga", "-m", "virtio-serial", "-p", device, "-t", "/run", "-l", "/run/qemu-ga.log",
              (char *)0);
        _exit(127);
    }
}

/* -- process 1 ------------------------------------------------------------------------------------------------------ */

static void load_modules(void)
{
    char names[512], path[128], *rest_of;
    if (read_file("/modules/order", names, sizeof names) < 0)
        return;
    for (char *name = strtok_r(names, "\n", &rest_of); name; name = strtok_r(0, "\n", &rest_of)) {
        snprintf(path, sizeof path, "/modules/%s", name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0 || syscall(SYS_finit_module, file, "", 0))
            say("BAD module %s: %s\n", name, strerror(errno));
        close(file);
    }
}

static void prepare(void)
{
    struct termios raw;
    mount("proc", "/proc", "proc", 0, 0);
    mount("sysfs", "/sys", "sysfs", 0, 0);
    mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
    int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
    for (int fd = 0; fd < 3; fd++)
        dup2(console, fd);
    if (!tcgetattr(console, &raw)) {
        cfmakeraw(&raw);
        cfsetspeed(&raw, B115200);
        tcsetattr(console, TCSANOW, &raw);
    }
    signal(SIGCHLD, SIG_IGN);
    read_file("/proc/cmdline", command_line, sizeof command_line);
    say("\n"); /* ends what the kernel left unfinished */
}

/* Runs /sbin/init of the ext4 file system on a disk; returns if that fails. */
static void start_system(const char *disk)
{
    if (mount(disk, "/mnt", "ext4", 0, 0) || mount("/dev", "/mnt/dev", 0, MS_MOVE, 0) ||
        mount("/proc", "/mnt/proc", 0, MS_MOVE, 0) || mount("/sys", "/mnt/sys", 0, MS_MOVE, 0) || chroot("/mnt") ||
        chdir("/"))
        say("BAD root: %s\n", strerror(errno));
    signal(SIGCHLD, SIG_DFL); /* what is ignored stays so across exec */
    execl("/sbin/init", "init", (char *)0);
    say("BAD /sbin/init: %s\n", strerror(errno));
}

int main(int words, char **word)
{
    pthread_t thread;
    uint64_t interval;

    /* The agent runs hwclock after it has set the time; there is no clock to write. */
    if (words > 0 && strstr(word[0], "hwclock"))
        return 0;
    if (getpid() != 1) { /* run by the agent as /sbin/shutdown */
        sync();
        return reboot(RB_POWER_OFF);
    }
    prepare();
    interval = number("interval_ms", "55") * 1000000;
    ours = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    seen = ours + PAGE / SECTOR;
    load_modules();
    if (*option("root", ""))
        start_system(option("root", ""));
    open_disks();
    each_disk(cold_disk);
    open_file();
    start_agent();
    pthread_create(&thread, 0, watch_clock, 0);
    if (number("dirty_mib", "0"))
        pthread_create(&thread, 0, dirty, 0);
    for (uint64_t next = now();;) {
        if (count)
            each_disk(check_disk);
        count++;
        each_disk(write_disk);
        each_disk(check_disk);
        write_to_file();
        say("N %08" PRIx32 "\n", count);
        if (count % GAP_EVERY == 0) {
            say("GAP %" PRIu64 "\n", longest_gap / 1000000);
            say("WROTE %" PRIu64 "\n", rewritten);
            longest_gap = 0;
        }
        next += interval;
        uint64_t time = now();
        if (next > time)
            rest(next - time);
        else
            next = time;
    }
}
