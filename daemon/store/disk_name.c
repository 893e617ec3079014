/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A name is accepted only in the exact form that kvd writes, so no two names mean one
 * file, and foreign files in the directory are ignored.
 *
 * Texts of faults name the file and the end of the directory's path: the end of a message
 * is more important than the start of the path.
 */
#include "daemon/store/disk_name.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLAB_END ".slab"
#define NAMED_END ".desc"
#define TMP_END ".tmp"
#define PATH_SHOWN 120

static const char *name_of_slab(const struct disk_file *file,
				char name[DISK_FILE_NAME_BYTES])
{
	snprintf(name, DISK_FILE_NAME_BYTES, "%05" PRIu32 ".%" PRIu64 SLAB_END,
		 file->number, file->slot_bytes);
	return name;
}

const char *disk_file_name(const struct disk_op *op, char name[DISK_FILE_NAME_BYTES])
{
	switch (op->what) {
	case DISK_LIST:
	case DISK_SPACE:
	case DISK_WHATS:
		snprintf(name, DISK_FILE_NAME_BYTES, ".");
		break;
	case DISK_NAMED_READ:
	case DISK_NAMED_WRITE:
	case DISK_NAMED_REMOVE:
		snprintf(name, DISK_FILE_NAME_BYTES, "%.80s" NAMED_END, op->name);
		break;
	case DISK_MAKE:
	case DISK_REMOVE:
	case DISK_READ:
	case DISK_WRITE:
	case DISK_SYNC:
		return name_of_slab(&op->file, name);
	}
	return name;
}

const char *disk_tmp_name(const struct disk_op *op, char name[DISK_FILE_NAME_BYTES])
{
	size_t len = strlen(disk_file_name(op, name));

	snprintf(name + len, DISK_FILE_NAME_BYTES - len, TMP_END);
	return name;
}

/* Only as name_of_slab() would write it. */
bool disk_slab_parse(const char *name, struct disk_file *file_p)
{
	char again[DISK_FILE_NAME_BYTES];
	char *end;
	unsigned long number;

	if (*name < '0' || *name > '9')
		return false;
	errno = 0;
	number = strtoul(name, &end, 10);
	if (errno || number > UINT32_MAX || *end != '.' || end[1] < '1' || end[1] > '9')
		return false;
	file_p->number = (uint32_t)number;
	file_p->slot_bytes = strtoull(end + 1, NULL, 10);
	return !errno && strcmp(name_of_slab(file_p, again), name) == 0;
}

static bool name_ends(const char *name, const char *end)
{
	size_t len = strlen(name), end_len = strlen(end);

	return len > end_len && strcmp(name + len - end_len, end) == 0;
}

bool disk_named_parse(const char *file_name, char name[DISK_NAME_MAX + 1])
{
	size_t len = strlen(file_name) - strlen(NAMED_END);

	if (!name_ends(file_name, NAMED_END) || len > DISK_NAME_MAX)
		return false;
	snprintf(name, DISK_NAME_MAX + 1, "%.*s", (int)len, file_name);
	return disk_name_ok(name);
}

bool disk_is_leftover(const char *name)
{
	char whole[NAME_MAX + 1], named[DISK_NAME_MAX + 1];
	struct disk_file file;

	if (!name_ends(name, TMP_END))
		return false;
	snprintf(whole, sizeof(whole), "%.*s", (int)(strlen(name) - strlen(TMP_END)),
		 name);
	return disk_slab_parse(whole, &file) || disk_named_parse(whole, named);
}

const char *disk_path_shown(const char *path)
{
	size_t len = strlen(path);

	return len > PATH_SHOWN ? path + len - PATH_SHOWN : path;
}

static enum err_code name_fault_code(int no)
{
	switch (no) {
	case ENOSPC:
	case EDQUOT:
	case EFBIG:
	case EMFILE:
	case ENFILE:
		return ERR_LIMIT;
	case ENOENT:
		return ERR_NOTFOUND;
	case EEXIST:
		return ERR_EXIST;
	case ENOMEM:
		return ERR_NOMEM;
	case EPERM:
	case EACCES:
		return ERR_PERM;
	default:
		return ERR_IO;
	}
}

int disk_fault(const char *path, const struct disk_op *op, uint64_t offset, int no)
{
	char name[DISK_FILE_NAME_BYTES], where[40] = "", words[80];

	disk_file_name(op, name);
	if (offset != DISK_NOWHERE)
		snprintf(where, sizeof(where), " at offset %" PRIu64, offset);
	if (no == 0)
		return err_raise(ERR_IO, "%s/%s is shorter than expected%s",
				 disk_path_shown(path), name, where);
	if (no == EOPNOTSUPP)
		return err_raise(ERR_IO, "%s/%s: its file system does not reserve space ",
				 disk_path_shown(path), name);
	return err_raise(name_fault_code(no), "%s/%s%s: %s", disk_path_shown(path), name,
			 where, strerror_r(no, words, sizeof(words)));
}

static int name_by_number(const void *a, const void *b)
{
	const struct disk_file *x = &((const struct disk_slab *)a)->file,
			       *y = &((const struct disk_slab *)b)->file;

	if (x->number != y->number)
		return x->number < y->number ? -1 : 1;
	return (x->slot_bytes > y->slot_bytes) - (x->slot_bytes < y->slot_bytes);
}

static int named_compare(const void *a, const void *b)
{
	return strcmp(((const struct disk_named *)a)->name,
		      ((const struct disk_named *)b)->name);
}

/* No array at all is none to sort. */
void disk_list_sort(struct disk_list *list)
{
	if (list->slab_count)
		qsort(list->slabs, list->slab_count, sizeof(*list->slabs),
		      name_by_number);
	if (list->named_count)
		qsort(list->named, list->named_count, sizeof(*list->named),
		      named_compare);
}
