/* SPDX-License-Identifier: Apache-2.0 */
/* What a lower half's own source defines; lower.c is its main, the table is generated. */
#ifndef FLYT_SPLIT_LOWER_H
#define FLYT_SPLIT_LOWER_H

#include "../abi.h"

extern const struct split_info *split_info; /* the loader's record, from LHINFO_PTR */

/* Before the functions are published; NULL, or why the half can't serve. */
const char *lower_start(void);
const char *lower_save(split_put put);
const char *lower_restore(split_get get);

/* The generated table. */
extern const uint64_t lower_digest, lower_count;
extern void *const lower_table[];

#endif
