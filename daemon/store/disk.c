/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of every disk on the loop. It checks submitted ops, counts them, and delivers
 * ended ones by a mailbox, some a turn. The end of opening is delivered in the same way,
 * as an item that is not an op.
 *
 * An op that cannot be accepted ends like any other, by the mailbox: so `done` is never
 * called from inside disk_submit(), and the submitter has one path for faults.
 */
#include "daemon/store/disk.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/store/disk_impl.h"

static void disk_count(struct disk_figures *figures, const struct disk_op *op)
{
	figures->in_flight--;
	figures->ended++;
	if (op->result < 0) {
		figures->errors += op->err.code == ERR_IO;
	} else if (op->what == DISK_READ) {
		figures->reads++;
		figures->read_bytes += op->moved;
	} else if (op->what == DISK_WRITE) {
		figures->writes++;
		figures->written_bytes += op->moved;
	}
}

static void disk_on_item(struct mailbox *box, struct list *item)
{
	struct disk *disk = container_of(box, struct disk, box);
	bool failed = disk->why.code != ERR_OK;
	struct disk_op *op;

	if (item == &disk->opened) {
		disk->state = failed ? DISK_STATE_FAILED : DISK_STATE_OPEN;
		if (!disk->closing)
			disk->on_open(disk->arg, disk, failed ? &disk->why : NULL);
		return;
	}
	op = list_entry(item, struct disk_op, link);
	disk_count(&disk->figures, op);
	op->done(op);
}

int disk_init(struct disk *disk, struct loop *loop, const struct disk_ops *ops,
	      const struct disk_args *args)
{
	assert(args->on_open);
	disk->ops = ops;
	disk->on_open = args->on_open;
	disk->arg = args->arg;
	list_init(&disk->opened);
	return err_pass(mailbox_init(&disk->box, loop, disk_on_item));
}

void disk_fini(struct disk *disk)
{
	mailbox_fini(&disk->box);
}

void disk_deliver(struct disk *disk)
{
	bool more = disk->box.on_item != NULL; /* was made */

	while (more) {
		mailbox_deliver(&disk->box);
		pthread_mutex_lock(&disk->box.lock);
		more = !list_empty(&disk->box.items);
		pthread_mutex_unlock(&disk->box.lock);
	}
}

void disk_opened(struct disk *disk)
{
	mailbox_put(&disk->box, &disk->opened);
}

void disk_ended(struct disk *disk, struct disk_op *op)
{
	list_init(&op->link);
	mailbox_put(&disk->box, &op->link);
}

/* ---- interface ---- */

bool disk_name_ok(const char *name)
{
	size_t len = strspn(name, "abcdefghijklmnopqrstuvwxyz"
				  "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_");

	return len > 0 && len <= DISK_NAME_MAX && !name[len];
}

static bool disk_aligned(const struct disk_op *op)
{
	uint64_t all = op->offset | op->iov[0].iov_len | op->iov[1].iov_len |
		       (uintptr_t)op->iov[0].iov_base;

	if (op->iov[1].iov_len)
		all |= (uintptr_t)op->iov[1].iov_base;
	return all % DISK_ALIGN == 0 && op->iov[0].iov_len > 0;
}

static bool disk_op_ok(const struct disk_op *op)
{
	switch (op->what) {
	case DISK_LIST:
		return op->list != NULL;
	case DISK_SPACE:
		return true;
	case DISK_MAKE:
		return op->file.slot_bytes > 0 && op->bytes > 0;
	case DISK_REMOVE:
	case DISK_SYNC:
		return op->file.slot_bytes > 0;
	case DISK_READ:
	case DISK_WRITE:
		return op->file.slot_bytes > 0 && disk_aligned(op);
	case DISK_NAMED_WRITE:
		return disk_name_ok(op->name) &&
		       op->iov[0].iov_len <= DISK_NAMED_BYTES_MAX;
	case DISK_NAMED_READ:
	case DISK_NAMED_REMOVE:
		return disk_name_ok(op->name);
	case DISK_WHATS:
		break;
	}
	return false;
}

void disk_submit(struct disk *disk, struct disk_op *op)
{
	bool ok = disk_op_ok(op);

	assert(ok && op->done);
	list_init(&op->link);
	op->result = 0;
	op->err.code = ERR_OK;
	op->moved = 0;
	memset(&op->own, 0, sizeof(op->own));
	if (op->what == DISK_LIST)
		*op->list = (struct disk_list){0};
	disk->figures.in_flight++;
	if (disk->state == DISK_STATE_OPEN && !disk->closing) {
		disk->ops->submit(disk, op);
		return;
	}
	op->result = -err_errno(ERR_STATE);
	err_set(&op->err, ERR_STATE, "the disk is not open");
	mailbox_post(&disk->box, &op->link);
}

void disk_close(struct disk *disk)
{
	if (disk->closing)
		return;
	disk->closing = true;
	disk->ops->close(disk);
}

bool disk_drained(const struct disk *disk)
{
	return disk->closing && disk->figures.in_flight == 0 && disk->ops->idle(disk);
}

int disk_free(struct disk *disk)
{
	if (!disk)
		return 0;
	disk_close(disk);
	return disk->ops->free(disk);
}

void disk_list_fini(struct disk_list *list)
{
	mem_free(list->slabs);
	mem_free(list->named);
	*list = (struct disk_list){0};
}

bool disk_direct(const struct disk *disk)
{
	return disk->direct;
}

void disk_figures(const struct disk *disk, struct disk_figures *figures_p)
{
	*figures_p = disk->figures;
}
