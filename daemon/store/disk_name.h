/* SPDX-License-Identifier: Apache-2.0 */
/* disk_name: names of files and texts of faults, also of a simulated disk. Pure. */
#ifndef KVD_STORE_DISK_NAME_H
#define KVD_STORE_DISK_NAME_H

#include "daemon/store/disk.h"

#define DISK_FILE_NAME_BYTES 96u

/* "00017.1052672.slab", "NAME.desc"; with the suffix ".tmp" during creation. */
const char *disk_file_name(const struct disk_op *op, char name[DISK_FILE_NAME_BYTES]);
const char *disk_tmp_name(const struct disk_op *op, char name[DISK_FILE_NAME_BYTES]);
/* False: not such a name. */
bool disk_slab_parse(const char *file_name, struct disk_file *file_p);
bool disk_named_parse(const char *file_name, char name[DISK_NAME_MAX + 1]);
bool disk_is_leftover(const char *file_name);

/* The fault of a call on the op's file, at this offset of it (DISK_NOWHERE: the whole
 * file). no 0: the file ends there. */
#define DISK_NOWHERE UINT64_MAX
int disk_fault(const char *path, const struct disk_op *op, uint64_t offset, int no);
const char *disk_path_shown(const char *path);

void disk_list_sort(struct disk_list *list);

#endif
