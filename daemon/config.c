/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config.h"

#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#include "base/file.h"

#define CONFIG_BYTES_MAX 65536

enum kind { TEXT, PATH, ADDR, COUNT, FLAG };

/* One table: name, environment, kind, place, default, help. */
static const struct option_row {
    const char *name, *env;
    enum kind kind;
    size_t offset, bytes;
    const char *arg, *help;
} table[] = {
#define AT(field) offsetof(struct daemon_config, field), sizeof(((struct daemon_config *)0)->field)
    {"config", "BELAYD_CONFIG", PATH, AT(file), "FILE", "YAML with these options as keys"},
    {"name", "BELAYD_NAME", TEXT, AT(name), "NODE", "this node's name (default: the host's)"},
    {"state-dir", "BELAYD_STATE_DIR", PATH, AT(state_dir), "DIR",
     "what must survive (default: $XDG_STATE_HOME/belay,\n"
     "                     as root /var/lib/belay)"},
    {"socket", "BELAYD_SOCKET", PATH, AT(socket), "PATH",
     "for ranks and `belay` (default: NODE.sock in\n"
     "                     $XDG_RUNTIME_DIR/belay, as root /run/belay)"},
    {"listen", "BELAYD_LISTEN", ADDR, AT(listen), "ADDR:PORT",
     "control (default 127.0.0.1:7420); port 0: a free one"},
    {"bulk", "BELAYD_BULK", ADDR, AT(bulk), "ADDR:PORT",
     "memory for other nodes (default: beside --listen)"},
    {"head", "BELAYD_HEAD", ADDR, AT(head), "ADDR:PORT",
     "the head's control address; without it this is the head"},
    {"standby", "BELAYD_STANDBY", TEXT, AT(standby), "NODE",
     "on the head: the node that keeps a copy of the store"},
    {"ranks-max", "BELAYD_RANKS_MAX", COUNT, AT(ranks_max), "N",
     "ranks hosted at once (default 64)"},
    {"foreground", "BELAYD_FOREGROUND", FLAG, AT(foreground), NULL,
     "stay in the foreground (always so)"},
#undef AT
};
#define TABLE_COUNT (sizeof(table) / sizeof(table[0]))

static void help_print(void)
{
    puts("Usage: belayd [OPTION...]\n\n"
         "Belay's daemon, one per node: starts and watches ranks, holds their newest\n"
         "state in memory, and brings the run back when something is lost.\n");
    for (size_t i = 0; i < TABLE_COUNT; i++) {
        char left[64];

        snprintf(left, sizeof(left), "--%s%s%s", table[i].name, table[i].arg ? " " : "",
                 table[i].arg ? table[i].arg : "");
        printf("  %-18s %s%s\n", left, strlen(left) > 18 ? "\n                     " : "",
               table[i].help);
    }
    puts("  --help, --version\n\n"
         "Each option is also read from the environment (BELAYD_NAME, ...) and from the\n"
         "file; the command line wins. Only loopback addresses are taken: TLS is not\n"
         "built into this version.\n\n"
         "Examples:\n"
         "  belayd --name n1 --state-dir /tmp/n1 --socket /tmp/n1.sock\n"
         "  belayd --name n2 --state-dir /tmp/n2 --socket /tmp/n2.sock \\\n"
         "         --listen 127.0.0.1:0 --head 127.0.0.1:7420\n\n"
         "Exit codes: 0 asked to end, 2 usage or configuration, 3 could not start.");
}

static const struct option_row *row_find(const char *name)
{
    for (size_t i = 0; i < TABLE_COUNT; i++) {
        if (strcmp(table[i].name, name) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

static int row_set(struct daemon_config *config, const struct option_row *row, const char *value,
                   const char *where, struct bl_errmsg *msg)
{
    char *at = (char *)config + row->offset;
    char absolute[1024];

    if (row->kind == COUNT || row->kind == FLAG) {
        char *end;
        unsigned long n = strtoul(value, &end, 10);

        if (row->kind == FLAG) {
            n = strcmp(value, "true") == 0 || strcmp(value, "1") == 0;
        } else if (*end != '\0' || end == value || n < 1 || n > 4096) {
            return bl_err(msg, BL_ECONFIG, "%s%s: '%s' is not a number from 1 to 4096", where,
                          row->name, value);
        }
        *(uint32_t *)(void *)at = (uint32_t)n;
        return 0;
    }
    if (row->kind == PATH && value[0] != '/') {
        char cwd[512];

        if (!getcwd(cwd, sizeof(cwd)) || bl_path_join(absolute, sizeof(absolute), cwd, value)) {
            return bl_err(msg, BL_ECONFIG, "%s%s: path too long", where, row->name);
        }
        value = absolute;
    }
    if (value[0] == '\0' || strlen(value) >= row->bytes) {
        return bl_err(msg, BL_ECONFIG, "%s%s: %s", where, row->name,
                      value[0] ? "too long" : "empty");
    }
    memcpy(at, value, strlen(value) + 1);
    return 0;
}

/* A flat mapping of scalars, and nothing else. */
static int document_read(struct daemon_config *config, yaml_document_t *doc, const char *path,
                         struct bl_errmsg *msg)
{
    yaml_node_t *root = yaml_document_get_root_node(doc);
    char where[1100];

    if (!root) {
        return 0;
    }
    if (root->type != YAML_MAPPING_NODE) {
        return bl_err(msg, BL_ECONFIG, "%s: not a mapping of option: value", path);
    }
    for (yaml_node_pair_t *pair = root->data.mapping.pairs.start;
         pair < root->data.mapping.pairs.top; pair++) {
        yaml_node_t *key = yaml_document_get_node(doc, pair->key);
        yaml_node_t *value = yaml_document_get_node(doc, pair->value);

        snprintf(where, sizeof(where), "%s:%zu:%zu: ", path, key->start_mark.line + 1,
                 key->start_mark.column + 1);
        if (key->type != YAML_SCALAR_NODE || value->type != YAML_SCALAR_NODE) {
            return bl_err(msg, BL_ECONFIG, "%soption: value is wanted here", where);
        }
        const struct option_row *row = row_find((const char *)key->data.scalar.value);

        if (!row || row->offset == offsetof(struct daemon_config, file)) {
            return bl_err(msg, BL_ECONFIG, "%sno option '%s'", where, key->data.scalar.value);
        }
        int rc = row_set(config, row, (const char *)value->data.scalar.value, where, msg);

        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int file_read(struct daemon_config *config, const char *path, struct bl_errmsg *msg)
{
    yaml_parser_t parser;
    yaml_document_t doc;
    char *text;
    size_t bytes;
    int rc = bl_file_read(path, CONFIG_BYTES_MAX, &text, &bytes, msg);

    if (rc != 0) {
        return bl_err_in(msg, BL_ECONFIG, "configuration: ");
    }
    yaml_parser_initialize(&parser);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
    if (!yaml_parser_load(&parser, &doc)) {
        rc = bl_err(msg, BL_ECONFIG, "%s:%zu:%zu: %s", path, parser.problem_mark.line + 1,
                    parser.problem_mark.column + 1, parser.problem ? parser.problem : "not YAML");
    } else {
        rc = document_read(config, &doc, path, msg);
        yaml_document_delete(&doc);
    }
    yaml_parser_delete(&parser);
    free(text);
    return rc;
}

static int defaults_set(struct daemon_config *config, struct bl_errmsg *msg)
{
    const char *state = getenv("XDG_STATE_HOME"), *runtime = getenv("XDG_RUNTIME_DIR");
    const char *home = getenv("HOME");
    int n = 0;

    if (config->name[0] == '\0') {
        char host[sizeof(config->name)] = "";

        BL_IGNORE(gethostname(host, sizeof(host) - 1) != 0, "then it has no name, and is told so");
        memcpy(config->name, host, sizeof(host));
        config->name[strcspn(config->name, ".")] = '\0';
    }
    if (config->state_dir[0] == '\0') {
        n = geteuid() == 0
                ? snprintf(config->state_dir, sizeof(config->state_dir), "/var/lib/belay")
            : state ? snprintf(config->state_dir, sizeof(config->state_dir), "%s/belay", state)
                    : snprintf(config->state_dir, sizeof(config->state_dir),
                               "%s/.local/state/belay", home ? home : "");
    }
    if (config->socket[0] == '\0') {
        n = geteuid() == 0 || !runtime ? snprintf(config->socket, sizeof(config->socket),
                                                  "/run/belay/%s.sock", config->name)
                                       : snprintf(config->socket, sizeof(config->socket),
                                                  "%s/belay/%s.sock", runtime, config->name);
    }
    if (n >= (int)sizeof(config->socket) || strchr(config->name, '/')) {
        return bl_err(msg, BL_ECONFIG, "name or default paths cannot be used: %s", config->name);
    }
    if (config->listen[0] == '\0') {
        snprintf(config->listen, sizeof(config->listen), "127.0.0.1:7420");
    }
    if (config->bulk[0] == '\0') { /* one port up; a free one beside a free one */
        const char *colon = strrchr(config->listen, ':');
        int port = colon ? atoi(colon + 1) : 0;

        snprintf(config->bulk, sizeof(config->bulk), "%.*s:%d",
                 (int)(colon ? colon - config->listen : 0), config->listen, port ? port + 1 : 0);
    }
    if (config->ranks_max == 0) {
        config->ranks_max = 64;
    }
    return 0;
}

/* Command line into `given`, an empty config; the index in the table is getopt's value. */
static int argv_read(struct daemon_config *given, int argc, char **argv, struct bl_errmsg *msg)
{
    struct option longs[TABLE_COUNT + 3] = {{0}};
    int opt;

    for (size_t i = 0; i < TABLE_COUNT; i++) {
        longs[i] =
            (struct option){table[i].name, table[i].kind == FLAG ? 0 : 1, NULL, 256 + (int)i};
    }
    longs[TABLE_COUNT] = (struct option){"help", 0, NULL, 'h'};
    longs[TABLE_COUNT + 1] = (struct option){"version", 0, NULL, 'v'};
    opterr = 0;
    while ((opt = getopt_long(argc, argv, ":h", longs, NULL)) != -1) {
        if (opt == 'h') {
            help_print();
            exit(0);
        }
        if (opt == 'v') {
            printf("belayd %s\n", BELAY_VERSION);
            exit(0);
        }
        if (opt == '?' || opt == ':') {
            return bl_err(msg, BL_ECONFIG, "%s: %s", argv[optind - 1],
                          opt == ':' ? "a value is missing" : "no such option");
        }
        const struct option_row *row = &table[opt - 256];
        int rc = row_set(given, row, row->kind == FLAG ? "true" : optarg, "--", msg);

        if (rc != 0) {
            return rc;
        }
    }
    return optind < argc ? bl_err(msg, BL_ECONFIG, "%s: no argument is wanted", argv[optind]) : 0;
}

int daemon_config_parse(struct daemon_config *ret, int argc, char **argv, struct bl_errmsg *msg)
{
    static struct daemon_config given;
    int rc = argv_read(&given, argc, argv, msg);
    const char *file = given.file[0] ? given.file : getenv("BELAYD_CONFIG");

    memset(ret, 0, sizeof(*ret));
    if (rc == 0 && !file && access("/etc/belay/belayd.yaml", R_OK) == 0) {
        file = "/etc/belay/belayd.yaml";
    }
    if (rc == 0 && file) {
        rc = file_read(ret, file, msg);
    }
    for (size_t i = 0; rc == 0 && i < TABLE_COUNT; i++) {
        const char *value = getenv(table[i].env);

        if (value) {
            char where[64];

            snprintf(where, sizeof(where), "%s: ", table[i].env);
            rc = row_set(ret, &table[i], value, where, msg);
        }
    }
    for (size_t i = 0; rc == 0 && i < TABLE_COUNT; i++) { /* what the command line set wins */
        const char *at = (const char *)&given + table[i].offset;

        if (table[i].kind == COUNT || table[i].kind == FLAG ? *(const uint32_t *)(const void *)at
                                                            : (uint32_t)at[0]) {
            memcpy((char *)ret + table[i].offset, at, table[i].bytes);
        }
    }
    return rc ? rc : defaults_set(ret, msg);
}
