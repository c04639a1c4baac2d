/*
 * UEFI probe: the BIOS probe's promise and protocol (README.md) as an UEFI application, and a non-volatile variable.
 *
 * It is started from the ESP of the first disk and never returns.  The ESP is a FAT file system of 1 MiB without a
 * partition table, whose reserved sectors leave LBA 1 to 7 alone; what lies beyond 1 MiB is free for the load of the
 * busy variant (-DBUSY=1).
 *
 * The variable SnaporchProbe holds the number of the power-on in its upper 16 bits, and in its lower 16 bits the count
 * at which it was set: 0 at power-on, then every 64 counts.  What was found at power-on, and every value set, is
 * printed.
 */

#include "efi.h"

#ifndef BUSY
#define BUSY 0
#endif

enum {
    MAX_DISKS = 16,
    SECTOR = 512,
    COUNT_LBA = 1,
    LOAD_LBA = 2048,
    LOAD_SECTORS = 64,
    LOAD_SLOTS = 32,
    NVRAM_EVERY = 64,
    COM1 = 0x3f8,
    LINE_STATUS = COM1 + 5,
    TRANSMITTER_EMPTY = 0x20,
    TICKS_PER_COUNT = 5, /* of the firmware's timer, which ticks every 10 ms */
};

struct sector {
    char magic[8];
    uint32_t count, complement, disk, filler[123];
};

static struct efi_block_io *disks[MAX_DISKS];
static unsigned disk_count;
static uint32_t count;
static uint32_t boot_number;
/* By parity of the count, as the disk must be and as it was read. */
static _Alignas(4096) struct sector ours[2 + BUSY * LOAD_SECTORS];
static _Alignas(4096) struct sector seen[2];

static const struct efi_guid block_io_guid = EFI_BLOCK_IO_GUID;
static const struct efi_guid device_path_guid = EFI_DEVICE_PATH_GUID;
static const struct efi_guid variable_guid = {
    0x5c3f1e52, 0x2a8b, 0x4b0e, {0x9d, 0x1f, 0x73, 0x6e, 0x61, 0x70, 0x6f, 0x72}};
static const uint16_t variable_name[] = u"SnaporchProbe";
static const uint32_t variable_attributes =
    EFI_VARIABLE_NON_VOLATILE | EFI_VARIABLE_BOOT | EFI_VARIABLE_RUNTIME;

/* The loader wants base relocations; the code needs none.  One block with two entries of no effect. */
__attribute__((section(".reloc"), aligned(4096), used)) static const uint32_t relocations[3] = {0x1000, 12, 0};

static uint8_t in(uint16_t port)
{
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "d"(port));
    return value;
}

static void out(uint16_t port, uint8_t value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "d"(port));
}

/* Gives up on a transmitter that does not get empty. */
static void put(char c)
{
    for (unsigned looks = 0; looks < 65536 && !(in(LINE_STATUS) & TRANSMITTER_EMPTY); looks++)
        ;
    out(COM1, (uint8_t)c);
}

static void text(const char *s)
{
    while (*s)
        put(*s++);
}

static void hex(const char *label, uint32_t value, int digits)
{
    text(label);
    while (digits--)
        put("0123456789abcdef"[value >> digits * 4 & 15]);
}

static void line(const char *label, uint32_t value)
{
    hex(label, value, 8);
    put('\n');
}

static int equal(const void *a, const void *b, unsigned size)
{
    const char *x = a, *y = b;
    while (size && *x == *y)
        x++, y++, size--;
    return !size;
}

static void compose_one(uint32_t number, uint32_t disk)
{
    volatile struct sector *s = &ours[number & 1];
    for (unsigned i = 0; i < 8; i++)
        s->magic[i] = "SNAPORCH"[i];
    s->count = number;
    s->complement = ~number;
    s->disk = disk;
    for (unsigned i = 0; i < 123; i++)
        s->filler[i] = number;
}

static void compose(uint32_t disk)
{
    compose_one(count, disk);
    compose_one(count - 1, disk);
}

static int read_disk(unsigned disk)
{
    struct efi_block_io *io = disks[disk];
    return !EFI_ERROR(io->read(io, io->media->id, COUNT_LBA, sizeof seen, seen));
}

/* A failure shows when the sectors are read back. */
static void write_disk(unsigned disk)
{
    struct efi_block_io *io = disks[disk];
    uint32_t id = io->media->id, parity = count & 1;

    compose(disk);
    if (BUSY)
        io->write(io, id, LOAD_LBA + count % LOAD_SLOTS * LOAD_SECTORS, LOAD_SECTORS * SECTOR, &ours[parity]);
    io->write(io, id, COUNT_LBA + parity, SECTOR, &ours[parity]);
    io->flush(io);
}

static void check_disk(unsigned disk)
{
    compose(disk);
    if (read_disk(disk) && equal(ours, seen, sizeof seen))
        return;
    hex("BAD disk=", disk, 2);
    hex(" want=", count, 8);
    hex(" got=", seen[count & 1].count, 8);
    line(" prev=", seen[~count & 1].count);
}

/* Says which count was found and starts anew from none. */
static void cold_disk(unsigned disk)
{
    uint32_t last = 0;

    if (read_disk(disk))
        for (unsigned i = 0; i < 2; i++)
            if (equal(seen[i].magic, "SNAPORCH", 8) && seen[i].count > last)
                last = seen[i].count;
    hex("COLD disk=", disk, 2);
    line(" last=", last);
    write_disk(disk);
}

static void each_disk(void (*action)(unsigned))
{
    for (unsigned disk = 0; disk < disk_count; disk++)
        action(disk);
}

static void set_variable(struct efi_runtime_services *runtime)
{
    uint32_t value = boot_number << 16 | (count & 0xffff);

    if (EFI_ERROR(runtime->set_variable(variable_name, &variable_guid, variable_attributes, sizeof value, &value)))
        text("BAD nvram cannot be set\n");
    else
        line("NVSET ", value);
}

static void cold_variable(struct efi_runtime_services *runtime)
{
    uint32_t value = 0, attributes;
    uint64_t size = sizeof value;

    if (EFI_ERROR(runtime->get_variable(variable_name, &variable_guid, &attributes, &size, &value)))
        value = 0;
    line("NVRAM ", value);
    boot_number = (value >> 16) + 1;
    set_variable(runtime);
}

/* Orders device paths as the machine's PCI slots are; a node's function comes before its device number. */
static int before(const struct efi_device_path *a, const struct efi_device_path *b)
{
    for (;;) {
        unsigned length = a->length[0] | a->length[1] << 8;
        if (a->type == 1 && a->subtype == 1 && b->type == 1 && b->subtype == 1) {
            unsigned x = a->data[1] << 3 | a->data[0], y = b->data[1] << 3 | b->data[0];
            if (x != y)
                return x < y;
        }
        for (unsigned i = 0; i < length; i++) {
            uint8_t x = ((const uint8_t *)a)[i], y = ((const uint8_t *)b)[i];
            if (x != y)
                return x < y;
        }
        if (a->type == 0x7f)
            return 0;
        a = (const void *)((const char *)a + length);
        b = (const void *)((const char *)b + length);
    }
}

static void find_disks(struct efi_boot_services *boot)
{
    const struct efi_device_path *paths[MAX_DISKS], *path;
    efi_handle *handles;
    struct efi_block_io *io;
    uint64_t found;

    if (EFI_ERROR(boot->locate_handle_buffer(EFI_BY_PROTOCOL, &block_io_guid, 0, &found, &handles)))
        found = 0;
    for (uint64_t i = 0; i < found && disk_count < MAX_DISKS; i++) {
        if (EFI_ERROR(boot->handle_protocol(handles[i], &block_io_guid, (void **)&io)) ||
            EFI_ERROR(boot->handle_protocol(handles[i], &device_path_guid, (void **)&path)))
            continue;
        if (io->media->removable || !io->media->present || io->media->partition || io->media->read_only ||
            io->media->block_size != SECTOR)
            continue;
        unsigned place = disk_count++;
        for (; place && before(path, paths[place - 1]); place--) {
            disks[place] = disks[place - 1];
            paths[place] = paths[place - 1];
        }
        disks[place] = io;
        paths[place] = path;
    }
}

efi_status EFIAPI efi_main(efi_handle image, struct efi_system_table *system)
{
    (void)image;
    system->boot->set_watchdog_timer(0, 0, 0, 0);
    put('\n'); /* ends what the firmware left unfinished */
    find_disks(system->boot);
    if (!disk_count)
        text("BAD no disk\n");
    each_disk(cold_disk);
    cold_variable(system->runtime);
    for (;;) {
        if (count)
            each_disk(check_disk);
        count++;
        each_disk(write_disk);
        each_disk(check_disk);
        line("N ", count);
        if (count % NVRAM_EVERY == 0)
            set_variable(system->runtime);
        for (unsigned i = 0; !BUSY && i < TICKS_PER_COUNT; i++)
            __asm__ volatile("hlt");
    }
}
