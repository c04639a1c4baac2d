/* The little of the UEFI 2.10 specification that the probe uses.  Functions it never calls are void pointers. */

#include <stdint.h>

#define EFIAPI __attribute__((ms_abi))
#define EFI_ERROR(status) ((int64_t)(status) < 0)

typedef uint64_t efi_status;
typedef void *efi_handle;

struct efi_guid {
    uint32_t a;
    uint16_t b, c;
    uint8_t d[8];
};

struct efi_table_header {
    uint64_t signature;
    uint32_t revision, size, crc, reserved;
};

struct efi_boot_services {
    struct efi_table_header header;
    void *tpl[2], *memory[5], *events[6], *protocols1[3];
    efi_status (EFIAPI *handle_protocol)(efi_handle, const struct efi_guid *, void **);
    void *protocols2[5], *images[5], *monotonic, *stall;
    efi_status (EFIAPI *set_watchdog_timer)(uint64_t seconds, uint64_t code, uint64_t size, uint16_t *data);
    void *connect[2], *open[3], *protocols_per_handle;
    efi_status (EFIAPI *locate_handle_buffer)(int how, const struct efi_guid *, void *key, uint64_t *count,
                                              efi_handle **);
};

struct efi_runtime_services {
    struct efi_table_header header;
    void *time[4], *virtual_memory[2];
    efi_status (EFIAPI *get_variable)(const uint16_t *name, const struct efi_guid *, uint32_t *attributes,
                                      uint64_t *size, void *data);
    void *next_variable;
    efi_status (EFIAPI *set_variable)(const uint16_t *name, const struct efi_guid *, uint32_t attributes, uint64_t size,
                                      const void *data);
};

struct efi_system_table {
    struct efi_table_header header;
    uint16_t *vendor;
    uint32_t revision;
    void *console[6];
    struct efi_runtime_services *runtime;
    struct efi_boot_services *boot;
};

struct efi_media {
    uint32_t id;
    uint8_t removable, present, partition, read_only, write_caching;
    uint32_t block_size, alignment;
    uint64_t last_block;
};

struct efi_block_io {
    uint64_t revision;
    struct efi_media *media;
    void *reset;
    efi_status (EFIAPI *read)(struct efi_block_io *, uint32_t media, uint64_t lba, uint64_t size, void *);
    efi_status (EFIAPI *write)(struct efi_block_io *, uint32_t media, uint64_t lba, uint64_t size, const void *);
    efi_status (EFIAPI *flush)(struct efi_block_io *);
};

struct efi_device_path {
    uint8_t type, subtype, length[2], data[];
};

enum {
    EFI_BY_PROTOCOL = 2,
    EFI_VARIABLE_NON_VOLATILE = 1,
    EFI_VARIABLE_BOOT = 2,
    EFI_VARIABLE_RUNTIME = 4,
};

#define EFI_BLOCK_IO_GUID {0x964e5b21, 0x6459, 0x11d2, {0x8e, 0x39, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}}
#define EFI_DEVICE_PATH_GUID {0x09576e91, 0x6d3f, 0x11d2, {0x8e, 0x39, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}}
