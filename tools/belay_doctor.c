/* SPDX-License-Identifier: Apache-2.0 */
/* belay doctor: is this machine as Belay wants it? */
#include <errno.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/human.h"
#include "base/file.h"
#include "tools/belay.h"
#include "tools/belay_doctor.h"

static const char help[] =
    "Usage: belay doctor [JOB.yaml] [--socket PATH] [--json]\n"
    "\n"
    "Looks at this machine: kernel features, limits, programs, GPUs and their\n"
    "health, ports, the daemon; with a job also its data and the room in its\n"
    "checkpoint directories. Changes nothing.\n"
    "\n"
    "  --socket PATH   of the daemon\n"
    "  --json          {\"schema\":1,\"findings\":N,\"checks\":[{\"name\",\"state\":\n"
    "                  \"ok|note|finding\",\"text\"}]}\n"
    "\n"
    "Examples:\n"
    "  belay doctor\n"
    "  belay doctor job.yaml --json | jq -r '.checks[] | select(.state != \"ok\")'\n"
    "\n"
    "Exit codes: 0 nothing found, 1 findings, 2 usage or a wrong job.\n";

#define ROOM_MIN_BYTES (1ull << 30) /* less free space than this in a root is a finding */

static const char *const state_names[] = {"ok", "note", "finding"};

void check_add(struct doctor *doctor, const char *name, enum check_state state, const char *format,
               ...)
{
    char text[TOOL_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    doctor->findings += state == CHECK_FINDING;
    if (!doctor->as_json) {
        printf("%-8s %-14s %s\n", state_names[state], name, text);
    }
    json_t *row =
        json_pack("{s:s,s:s,s:s}", "name", name, "state", state_names[state], "text", text);
    BL_ASSERT(row != NULL && json_array_append_new(doctor->checks, row) == 0);
}

/* The first line of a small file, without its end; "" when it is not there. */
static void line_read(const char *path, char *out, size_t bytes)
{
    FILE *file = fopen(path, "re");
    out[0] = '\0';
    if (file != NULL) {
        if (fgets(out, (int)bytes, file) == NULL) {
            out[0] = '\0';
        }
        fclose(file);
    }
    out[strcspn(out, "\n")] = '\0';
}

static bool in_path(const char *program)
{
    const char *path = getenv("PATH");
    char full[PATH_MAX];
    while (path != NULL && *path != '\0') {
        size_t length = strcspn(path, ":");
        snprintf(full, sizeof full, "%.*s/%s", (int)length, path, program);
        if (access(full, X_OK) == 0) {
            return true;
        }
        path += length + (path[length] == ':');
    }
    return false;
}

static void check_kernel(struct doctor *doctor)
{
    struct utsname name;
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    if (uname(&name) == 0) {
        check_add(doctor, "kernel", CHECK_OK, "%s %s", name.sysname, name.release);
    }
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    check_add(doctor, "pidfd", fd >= 0 ? CHECK_OK : CHECK_FINDING, "%s",
              fd >= 0 ? "there" : "missing: Linux 5.3 or newer is needed");
    if (fd >= 0) {
        close(fd);
    }
    fd = (int)syscall(SYS_io_uring_setup, 4, &params);
    if (fd >= 0) {
        check_add(doctor, "io_uring", CHECK_OK, "there");
        close(fd);
    } else {
        check_add(doctor, "io_uring", CHECK_NOTE,
                  "%s: checkpoints are written by pwrite, slower (kernel.io_uring_disabled, a "
                  "container's seccomp filter?)",
                  strerror(errno));
    }
    char shmem[128];
    line_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem, sizeof shmem);
    if (strstr(shmem, "[never]") != NULL || strstr(shmem, "[deny]") != NULL) {
        check_add(doctor, "huge pages", CHECK_NOTE,
                  "shmem_enabled is never: a dying rank takes longer to go (up to 90 ms per GiB). "
                  "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled");
    } else {
        check_add(doctor, "huge pages", shmem[0] != '\0' ? CHECK_OK : CHECK_NOTE, "%s",
                  shmem[0] != '\0' ? shmem : "this kernel has no transparent huge pages");
    }
}

static void check_limits(struct doctor *doctor)
{
    struct rlimit limit;
    char text[BL_HUMAN_MAX];
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        bool is_small = limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < (64u << 20);
        bl_human_bytes(text, limit.rlim_cur);
        check_add(doctor, "memlock", is_small && geteuid() != 0 ? CHECK_NOTE : CHECK_OK, "%s%s",
                  limit.rlim_cur == RLIM_INFINITY ? "unlimited" : text,
                  is_small && geteuid() != 0
                      ? ": checkpoints are written through plain buffers; in the unit: "
                        "AmbientCapabilities=CAP_IPC_LOCK"
                      : "");
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        bool is_small = limit.rlim_cur < 1024;
        check_add(doctor, "open files", is_small ? CHECK_FINDING : CHECK_OK, "%llu%s",
                  (unsigned long long)limit.rlim_cur, is_small ? ": raise it (ulimit -n)" : "");
    }
}

static void check_programs(struct doctor *doctor)
{
    static const char *const programs[] = {"belayd", "belay-shim", "belay-engine", "belay-train"};
    char dir[PATH_MAX], full[PATH_MAX + 32];
    int rc = bl_dir_of_exe(dir, sizeof dir);
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        snprintf(full, sizeof full, "%s/%s", rc == 0 ? dir : ".", programs[i]);
        bool is_there = access(full, X_OK) == 0;
        check_add(doctor, programs[i], is_there || in_path(programs[i]) ? CHECK_OK : CHECK_FINDING,
                  "%s",
                  is_there               ? full
                  : in_path(programs[i]) ? "in PATH"
                                         : "missing beside belay and in PATH");
    }
    bool has_stack = in_path("eu-stack");
    check_add(doctor, "eu-stack", has_stack ? CHECK_OK : CHECK_NOTE, "%s",
              has_stack ? "there"
                        : "missing: a hung rank is replaced without its stacks (package elfutils)");
    char scope[16];
    line_read("/proc/sys/kernel/yama/ptrace_scope", scope, sizeof scope);
    if (scope[0] > '1' && geteuid() != 0) {
        check_add(doctor, "ptrace", CHECK_NOTE,
                  "kernel.yama.ptrace_scope is %s: stacks of hung ranks cannot be taken", scope);
    }
}

/* Can the port be taken on loopback? 0 or an errno. */
static int port_try(uint16_t port)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(port)};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0) {
        return errno;
    }
    int rc = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    rc = rc != 0 || bind(fd, (struct sockaddr *)&addr, sizeof addr) != 0 || listen(fd, 1) != 0
             ? errno
             : 0;
    close(fd);
    return rc;
}

static void check_daemon(struct doctor *doctor, const char *path)
{
    static const struct {
        const char *name;
        uint16_t port;
    } ports[] = {{"control port", 7420}, {"bulk port", 7421}};
    struct bl_errmsg msg = {{0}};
    struct tool_link link;
    bool is_there = tool_link_open(&link, path, &msg) == 0;
    if (is_there) {
        check_add(doctor, "daemon", strcmp(link.build, BELAY_VERSION) == 0 ? CHECK_OK : CHECK_NOTE,
                  "%s answers at %s, version %s", link.node, path, link.build);
        tool_link_close(&link);
    } else {
        check_add(doctor, "daemon", CHECK_NOTE, "none answers at %s: %s", path, msg.text);
    }
    for (size_t i = 0; i < sizeof ports / sizeof *ports; i++) {
        int rc = port_try(ports[i].port);
        check_add(doctor, ports[i].name, rc == 0 || is_there ? CHECK_OK : CHECK_FINDING,
                  "%u on loopback: %s%s", ports[i].port, rc == 0 ? "free" : strerror(rc),
                  rc != 0 && !is_there ? "; belayd --listen and --bulk choose others" : "");
    }
}

static void check_root(struct doctor *doctor, const char *path)
{
    struct statvfs fs;
    char at[BL_PATH_MAX], room[BL_HUMAN_MAX];
    snprintf(at, sizeof at, "%s", path);
    /* The directory may not have been made yet: the nearest one above says how much room. */
    while (statvfs(at, &fs) != 0 && errno == ENOENT && strrchr(at, '/') != NULL &&
           strrchr(at, '/') != at) {
        *strrchr(at, '/') = '\0';
    }
    if (statvfs(at, &fs) != 0) {
        check_add(doctor, "root", CHECK_FINDING, "%s: %s", path, strerror(errno));
        return;
    }
    uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    bl_human_bytes(room, free_bytes);
    if (access(at, W_OK) != 0) {
        check_add(doctor, "root", CHECK_FINDING, "%s: %s: %s", path, at, strerror(errno));
    } else {
        check_add(doctor, "root", free_bytes < ROOM_MIN_BYTES ? CHECK_FINDING : CHECK_OK,
                  "%s: %s free", path, room);
    }
}

static int check_job(struct doctor *doctor, const char *path)
{
    struct bl_errmsg msg = {{0}};
    struct bl_job *job = calloc(1, sizeof *job);
    BL_ASSERT(job != NULL);
    int rc = bl_job_load(job, path, &msg);
    if (rc != 0) {
        tool_say(&tool_doctor, "%s", msg.text);
        free(job);
        return TOOL_USAGE;
    }
    for (uint32_t i = 0; i < job->root_count; i++) {
        check_root(doctor, job->roots[i].path);
    }
    for (uint32_t i = 0; i < job->data_file_count; i++) {
        bool can = access(job->data_files[i], R_OK) == 0;
        check_add(doctor, "data", can ? CHECK_OK : CHECK_FINDING, "%s%s%s", job->data_files[i],
                  can ? "" : ": ", can ? "" : strerror(errno));
    }
    free(job);
    return 0;
}

static int doctor_run(const struct tool_args *args)
{
    struct doctor doctor = {.checks = json_array(), .as_json = args->given & TOOL_OPT_JSON};
    BL_ASSERT(doctor.checks != NULL);
    check_kernel(&doctor);
    check_limits(&doctor);
    check_programs(&doctor);
    check_gpus(&doctor);
    check_daemon(&doctor, args->socket);
    int rc = args->word_count > 0 ? check_job(&doctor, args->words[0]) : 0;
    if (rc == 0 && doctor.as_json) {
        json_t *all = json_pack("{s:i,s:i,s:O}", "schema", 1, "findings", (int)doctor.findings,
                                "checks", doctor.checks);
        char *text = json_dumps(all, JSON_COMPACT | JSON_PRESERVE_ORDER);
        puts(text != NULL ? text : "{}");
        free(text);
        json_decref(all);
    }
    json_decref(doctor.checks);
    return rc != 0 ? rc : doctor.findings > 0 ? TOOL_FINDING : TOOL_DONE;
}

const struct tool_command tool_doctor = {
    .name = "doctor",
    .brief = "is this machine as Belay wants it?",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON,
    .word_count = 1,
    .run = doctor_run,
};
