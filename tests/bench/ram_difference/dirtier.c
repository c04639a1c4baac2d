/*
 * Process 1 of the guest of capture.py: fills memory with what RAM is made of, and changes as much of it as it
 * is told to on its console: "<pages> <seed>", answered by "DONE".
 *
 * Of every ten pages three are noise (packed or encrypted data), three text, three tables of pointers, one is zeros.
 * What changes lies in runs of 1 to 16 pages; of every two pages one is written anew, in the other 64 bytes change.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = 4096 };
static char words[WORDS][12];
static uint64_t state = 88172645463325252u;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void fill(unsigned char *page, uint64_t number)
{
    uint64_t *cells = (uint64_t *)page;
    switch (number % 10) {
    case 0:
        memset(page, 0, PAGE);
        break;
    case 1: case 2: case 3:
        for (int i = 0; i < PAGE / 8; i++)
            cells[i] = draw();
        break;
    case 4: case 5: case 6:
        for (int i = 0; i < PAGE - 12;) {
            const char *word = words[draw() % WORDS];
            int length = (int)strlen(word);
            memcpy(page + i, word, (size_t)length);
            i += length;
        }
        break;
    default:
        for (int i = 0; i < PAGE / 8; i++)
            cells[i] = i % 3 ? 0xffff888000000000u + (draw() & 0x3fffffc0) : draw() & 0xff;
    }
}

int main(int argc, char **argv)
{
    uint64_t pages = 0;
    (void)argc;
    for (char **each = environ; *each; each++)
        if (!strncmp(*each, "fill_mib=", 9))
            pages = strtoull(*each + 9, 0, 10) * 256;
    (void)argv;
    unsigned char *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < WORDS; i++) {
        int length = 2 + (int)(draw() % 8);
        for (int j = 0; j < length; j++)
            words[i][j] = (char)('a' + draw() % 26);
        words[i][length] = ' ';
    }
    for (uint64_t i = 0; i < pages; i++)
        fill(memory + i * PAGE, i);
    printf("FILLED %llu\n", (unsigned long long)pages);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        char *end;
        uint64_t left = strtoull(line, &end, 10);
        state = 88172645463325252u + strtoull(end, 0, 10) * 7919;
        while (left) {
            uint64_t run = 1 + draw() % 16, at = draw() % (pages - 16);
            for (uint64_t i = at; i < at + run && left; i++, left--) {
                if (i % 2)
                    fill(memory + i * PAGE, i);
                else
                    for (int j = 0; j < 64; j++)
                        memory[i * PAGE + 1024 + j] = (unsigned char)draw();
            }
        }
        printf("DONE\n");
        fflush(stdout);
    }
    pause();
}
