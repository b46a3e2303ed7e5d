/* SPDX-License-Identifier: Apache-2.0 */
#include "gpusim_shared.h"

#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpusim_device.h"

#define ALIGN     128u
#define TAIL      (gpusim_tail_bytes())
#define TAIL_BYTE 0xd7

unsigned char *gpusim_shared_take(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGN, bytes + TAIL + (bytes + TAIL == 0))) {
        fprintf(stderr, "gpusim: no memory for %zu bytes of shared memory\n", bytes);
        abort();
    }
    memset(static_cast<char *>(memory) + bytes, TAIL_BYTE, TAIL);
    return static_cast<unsigned char *>(memory);
}

void gpusim_shared_give(unsigned char *shared, size_t bytes)
{
    (void)bytes;
    free(shared);
}

bool gpusim_shared_is_whole(const unsigned char *shared, size_t bytes)
{
    for (size_t i = bytes; i < bytes + TAIL; i++) {
        if (shared[i] != TAIL_BYTE) {
            return false;
        }
    }
    return true;
}

/* ---- static variables, by their names in the module that has the kernel ----
 *
 * `__shared__ float x[8]` in a function f is a static variable, whose symbol is _ZZ<f's name>E<x>.
 * It is looked for in the file's symbol table, so a stripped module loses the poison, no more. */

#define VARIABLES_MAX 4096u
#define KERNELS_MAX   512u

struct range {
    void *memory;
    size_t bytes;
};

static struct {
    const char *name; /* of the launch: a literal, so that its address tells */
    uint32_t first, count;
} kernels[KERNELS_MAX];
static uint32_t kernel_count;
static struct range variables[VARIABLES_MAX];
static uint32_t variable_count;

/* The module that holds an address, and by how much it was moved. */
struct module {
    uintptr_t address, base;
    char path[4096];
};

static int module_match(struct dl_phdr_info *info, size_t, void *arg)
{
    struct module *m = static_cast<struct module *>(arg);
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + p->p_vaddr;
        if (p->p_type == PT_LOAD && m->address >= from && m->address < from + p->p_memsz) {
            m->base = info->dlpi_addr;
            snprintf(m->path, sizeof m->path, "%s",
                     info->dlpi_name[0] ? info->dlpi_name : "/proc/self/exe");
            return 1;
        }
    }
    return 0;
}

/* "12scale_kernel" of "(scale_kernel<float, 4>)": as mangled names have it. */
static void mangle(char *to, size_t bytes_max, const char *name)
{
    name += strspn(name, "( &");
    size_t length = strcspn(name, "<) ");
    for (size_t i = length; i > 0; i--) {
        if (name[i - 1] == ':') {
            name += i;
            length -= i;
            break;
        }
    }
    snprintf(to, bytes_max, "%zu%.*s", length, static_cast<int>(length), name);
}

static void symbols_scan(const char *file, const struct module *m, const char *mangled)
{
    const ElfW(Ehdr) *header = reinterpret_cast<const ElfW(Ehdr) *>(file);
    const ElfW(Shdr) *sections = reinterpret_cast<const ElfW(Shdr) *>(file + header->e_shoff);
    for (uint32_t i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) {
            continue;
        }
        const ElfW(Sym) *symbols =
            reinterpret_cast<const ElfW(Sym) *>(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (uint64_t k = 0; k < sections[i].sh_size / sizeof symbols[0]; k++) {
            const char *name = names + symbols[k].st_name;
            uint32_t at = symbols[k].st_shndx;
            if ((symbols[k].st_info & 0xf) == STT_OBJECT && strncmp(name, "_ZZ", 3) == 0 &&
                strstr(name, mangled) && at < header->e_shnum &&
                (sections[at].sh_flags & SHF_WRITE) && variable_count < VARIABLES_MAX) {
                variables[variable_count++] = {
                    reinterpret_cast<void *>(m->base + symbols[k].st_value), symbols[k].st_size};
            }
        }
    }
}

/* Fills the newest entry of `kernels`. */
static void variables_find(const void *kernel, const char *name)
{
    struct module m = {};
    char mangled[256];
    struct stat st;
    m.address = reinterpret_cast<uintptr_t>(kernel);
    dl_iterate_phdr(module_match, &m);
    int fd = open(m.path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        return;
    }
    void *file = mmap(NULL, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file != MAP_FAILED) {
        mangle(mangled, sizeof mangled, name);
        symbols_scan(static_cast<const char *>(file), &m, mangled);
        munmap(file, static_cast<size_t>(st.st_size));
    }
}

/* Red zones of ASan lie between the elements of a range; they are not to be touched by its rules.
 */
#if defined(__clang__) || defined(__GNUC__)
__attribute__((no_sanitize("address"), noinline))
#endif
static void
range_poison(const struct range *r)
{
    volatile uint16_t *to = static_cast<volatile uint16_t *>(r->memory);
    for (size_t i = 0; i < r->bytes / 2; i++) {
        to[i] = 0x7ff5;
    }
}

uint32_t gpusim_shared_find(const void *kernel, const char *name)
{
    uint32_t i = 0;
    while (i < kernel_count && kernels[i].name != name) {
        i++;
    }
    if (i == kernel_count && i < KERNELS_MAX) {
        kernels[i].name = name;
        kernels[i].first = variable_count;
        variables_find(kernel, name);
        kernels[i].count = variable_count - kernels[i].first;
        kernel_count++;
    }
    return i;
}

void gpusim_shared_poison(uint32_t kernel, unsigned char *shared, size_t bytes)
{
    gpusim_poison(shared, bytes);
    if (kernel < kernel_count) {
        for (uint32_t i = 0; i < kernels[kernel].count; i++) {
            range_poison(&variables[kernels[kernel].first + i]);
        }
    }
}
