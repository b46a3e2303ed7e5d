/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: manifests. The input is a manifest without its last member; its digest is put behind
 * it here, else nothing would get past it. What the reader takes, it writes again, and that reads
 * back to the same text.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/manifest.h"
#include "tests/fuzz/fuzz.h"

static void check_again(const struct ckpt_manifest *manifest)
{
    struct ckpt_manifest twice = {0};
    char *text = NULL, *again = NULL;
    size_t text_bytes = 0, again_bytes = 0;

    if (ckpt_manifest_encode(manifest, &text, &text_bytes, NULL) < 0) {
        return; /* parts of one name: read, but not written */
    }
    BL_ASSERT(ckpt_manifest_decode(&twice, text, text_bytes, NULL) == 0);
    BL_ASSERT(ckpt_manifest_encode(&twice, &again, &again_bytes, NULL) == 0);
    BL_ASSERT(text_bytes == again_bytes && memcmp(text, again, text_bytes) == 0);
    free(text);
    free(again);
    ckpt_manifest_close(&twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct ckpt_manifest manifest = {0};
    char *text = malloc(bytes + 32);
    int rc;

    BL_ASSERT(text != NULL);
    memcpy(text, data, bytes);
    snprintf(text + bytes, 32, "\"digest\":\"%016llx\"}\n",
             (unsigned long long)bl_xxh3(data, bytes));
    rc = ckpt_manifest_decode(&manifest, text, bytes + 29, &why);
    free(text);
    if (rc < 0) {
        BL_ASSERT(why.text[0] != '\0');
        return 0;
    }
    (void)(ckpt_manifest_complete(&manifest, &why) < 0);
    check_again(&manifest);
    ckpt_manifest_close(&manifest);
    return 0;
}
