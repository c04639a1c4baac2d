# BIOS probe: a boot sector that knows the truth about its own disks.
#
# It counts in RAM and keeps, on every hard disk the BIOS reports, two sectors: the one for even counts (LBA 1) and the
# one for odd counts (LBA 2), so that a disk always holds the last count and the one before.  Whoever restores RAM and
# disks to different instants is told so on the serial port.  One cycle:
#
#   1. read both sectors of every disk: they must hold what this RAM wrote last, and before that      -> else BAD
#   2. add one to the count in RAM
#   3. write the count to every disk, first disk first
#   4. read both sectors of every disk again                                                          -> else BAD
#   5. print the count
#   6. halt until the BIOS timer (18.2 Hz) has ticked six times: each count costs 20 ms of a processor
#
# Two sectors, because with one a guest frozen between 2 and 3 would overwrite the evidence of a wrong disk.
#
# Lines on COM1, each ended by a line feed (README.md describes them for all probes):
#
#   COLD disk=00 last=0000002a
#   N 00000042
#   BAD disk=00 want=00000042 got=00000042 prev=00000057
#
# --defsym LOAD=1: before each count 64 sectors, the first one like a count's, go to LBA 2048 + 64 * (count mod 32), so
# that an overlay grows and a commit has something to copy, far from the counts.  It waits for three ticks; with
# --defsym BUSY=1 for none.  Disks of 2 MiB at least.

        .intel_syntax noprefix
        .code16
        .global _start

        .set    BIOS_TICKS, 0x046c
        .set    BIOS_DISKS, 0x0475
        .set    SEEN, 0x7e00            # the two sectors as read
        .set    OURS, 0x8200            # the two sectors as they must be
    .ifdef LOAD
        .set    TICKS, 3
    .else
        .set    TICKS, 6
    .endif
        .set    COUNT_LBA, 1
        .set    LOAD_LBA, 2048
        .set    LOAD_SECTORS, 64
        .set    READ, 0x42
        .set    WRITE, 0x43

_start:
        cli
        xor     ax, ax
        mov     ds, ax
        mov     es, ax
        mov     ss, ax
        mov     sp, offset _start
        cld
        sti
        mov     ax, 0x00e3              # 9600 8N1
        xor     dx, dx
        int     0x14
        mov     al, '\n'                # ends what firmware or an earlier power-off left unfinished
        call    putc

cycle:
        mov     bp, offset check
        call    each_disk
        inc     dword ptr [count]
        mov     bp, offset write
        call    each_disk
        mov     bp, offset check
        call    each_disk
        mov     si, offset text_n
        mov     eax, [count]
        call    put_text_hex
        mov     al, '\n'
        call    putc
    .ifdef LOAD
    .ifndef BUSY
    .rept TICKS                         # there is no room to ask for the time
        hlt
    .endr
    .endif
    .else
        mov     bx, [BIOS_TICKS]
1:      hlt
        mov     ax, [BIOS_TICKS]
        sub     ax, bx
        cmp     ax, TICKS
        jb      1b
    .endif
        jmp     cycle

# Calls bp with dl = BIOS drive number for every hard disk.
each_disk:
        mov     dl, 0x80
1:      push    dx
        push    bp
        call    bp
        pop     bp
        pop     dx
        inc     dx
        mov     al, dl
        sub     al, 0x80
        cmp     al, [BIOS_DISKS]
        jb      1b
        ret

# OURS = both sectors of disk dl as they must be after the present count.
compose:
        mov     eax, [count]
        call    1f
        dec     eax
1:      mov     di, ax
        and     di, 1
        shl     di, 9
        add     di, offset OURS
        mov     si, offset magic
        movsd
        movsd
        stosd
        not     eax
        stosd
        not     eax
        push    eax
        movzx   eax, dl
        and     al, 0x7f
        stosd
        pop     eax
        mov     cx, 123
        rep     stosd
        ret

write:
        call    compose
        mov     ax, [count]
        and     ax, 1
        mov     di, ax
        shl     di, 9
        add     di, offset OURS
        inc     ax                      # = COUNT_LBA + parity
    .ifdef LOAD
        push    ax
        mov     ax, [count]
        and     ax, 31
        imul    ax, ax, LOAD_SECTORS
        add     ax, LOAD_LBA
        mov     cx, WRITE * 256 + LOAD_SECTORS
        call    transfer
        pop     ax
    .endif
        mov     cx, WRITE * 256 + 1     # a failure shows when the sector is read back
        # fall through

# ch = READ or WRITE, cl sectors at LBA ax of disk dl, from or to di.
transfer:
        push    0                       # the disk address packet, from its end: LBA, buffer, sectors, size
        push    0
        push    0
        push    ax
        push    0
        push    di
        mov     ah, ch
        mov     al, 0
        mov     ch, al
        push    cx
        push    16
        mov     si, sp
        int     0x13
        lea     sp, [si + 16]           # the carry flag stays
done:
        ret

check:
        call    compose
        mov     di, offset SEEN
        mov     ax, COUNT_LBA
        mov     cx, READ * 256 + 2
        call    transfer
        jc      bad
        mov     si, offset OURS
        cmp     dword ptr [count], 0
        je      cold
        mov     cx, 512
        repe    cmpsw
        je      done
bad:
        mov     si, offset text_bad
        call    put_disk
        mov     si, offset text_want
        mov     eax, [count]
        call    put_text_hex
        mov     bx, [count]
        and     bx, 1
        shl     bx, 9
        mov     si, offset text_got
        mov     eax, [bx + SEEN + 8]
        call    put_text_hex
        xor     bh, 2
        mov     si, offset text_prev
        mov     eax, [bx + SEEN + 8]
        jmp     put_line_end

# Says which count was found and starts anew from none.
cold:
        xor     eax, eax
        mov     bx, offset SEEN
1:      mov     si, offset magic
        mov     di, bx
        mov     cx, 4
        repe    cmpsw
        jne     2f
        cmp     eax, [bx + 8]
        jae     2f
        mov     eax, [bx + 8]
2:      add     bh, 2
        cmp     bh, (SEEN + 0x400) >> 8
        jne     1b
        push    eax
        mov     si, offset text_cold
        call    put_disk
        mov     si, offset text_last
        pop     eax
        call    put_line_end
        jmp     write

put_line_end:
        call    put_text_hex
        mov     al, '\n'
        # fall through

# Sends al; gives up after 65536 looks at a transmitter that does not get empty.
putc:
        push    cx
        push    dx
        push    ax
        mov     dx, 0x3fd
        xor     cx, cx
1:      in      al, dx
        test    al, 0x20
        loopz   1b
        pop     ax
        mov     dx, 0x3f8
        out     dx, al
        pop     dx
        pop     cx
        ret

# Text at si, then " disk=" and the index of disk dl in two digits.
put_disk:
        call    puts
        mov     si, offset text_disk
        call    puts
        mov     eax, edx
        and     al, 0x7f
        shl     eax, 24
        mov     cx, 2
        jmp     put_digits

# Text at si, then eax in eight digits.
put_text_hex:
        push    eax
        call    puts
        pop     eax
        mov     cx, 8
put_digits:
        rol     eax, 4
        push    ax
        and     al, 15
        cmp     al, 10
        sbb     al, 0x69
        das                             # nibble to ASCII
        or      al, 0x20                # lower case
        call    putc
        pop     ax
        loop    put_digits
        ret

1:      call    putc
puts:
        lodsb
        test    al, al
        jnz     1b
        ret

magic:          .ascii  "SNAPORCH"
text_cold:      .asciz  "COLD"
text_bad:       .asciz  "BAD"
text_n:         .asciz  "N "
text_disk:      .asciz  " disk="
text_want:      .asciz  " want="
text_got:       .asciz  " got="
text_prev:      .asciz  " prev="
text_last:      .asciz  " last="
count:          .long   0

        .org    510
        .word   0xaa55
