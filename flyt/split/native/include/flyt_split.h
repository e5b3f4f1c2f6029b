/* SPDX-License-Identifier: Apache-2.0 */
/* For programs that choose their own safe points; link with -lflytsplit. */
#ifndef FLYT_SPLIT_H
#define FLYT_SPLIT_H

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the upper half's state to `path` (NULL: the image named at the start). 0 when it is
 * written, 1 in the process that a restart has made of it, -errno if it can't be written: then
 * stderr has said why. */
int flyt_split_checkpoint(const char *path);

#ifdef __cplusplus
}
#endif
#endif
