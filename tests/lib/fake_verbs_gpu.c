/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What adapters do to memory of GPUs, which here is a file's: each registration maps it
 * for itself. A write is kept back, as one is that has left the adapter and is still on
 * its way through bridges and the GPU, where nobody sees it and it may land at any time.
 * A read by the same adapter of the same memory pushes it in front of itself.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/lib/fake_verbs_impl.h"

struct late {
	struct list link;
	const struct fake_device *device;
	const struct fake_reg *reg;
	ino_t file;
	uint8_t *to;
	uint64_t bytes;
	uint8_t data[];
};

void fake_verbs_gpu(int (*file)(uint64_t address, int *fd_p, uint64_t *offset_p))
{
	fabric.gpu_file = file;
}

bool fake_gpu_map(struct fake_reg *reg, int fd, uint64_t offset)
{
	uint64_t skip = offset & 4095;
	struct stat st;
	void *map;

	if (fstat(fd, &st) < 0)
		return false;
	if (offset > (uint64_t)st.st_size ||
	    reg->told.length > (uint64_t)st.st_size - offset) {
		errno = EINVAL;
		return false;
	}
	map = mmap(NULL, reg->told.length + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		   (off_t)(offset - skip));
	if (map == MAP_FAILED)
		return false;
	reg->map = map;
	reg->map_bytes = reg->told.length + skip;
	reg->alias = (uint8_t *)map + skip;
	reg->file = st.st_ino;
	return true;
}

static void land(struct late *late)
{
	memcpy(late->to, late->data, late->bytes);
	list_remove(&late->link);
	free(late);
}

void fake_gpu_unmap(struct fake_reg *reg)
{
	struct late *late;

	if (!reg->map)
		return;
	list_foreach_safe(late, &fabric.late, link) {
		if (late->reg != reg)
			continue;
		fabric.count.unseen++;
		land(late);
	}
	munmap(reg->map, reg->map_bytes);
	reg->map = NULL;
	reg->alias = NULL;
}

unsigned int fake_verbs_land(void)
{
	unsigned int n = 0;
	struct late *late;

	pthread_mutex_lock(&fabric.lock);
	list_foreach_safe(late, &fabric.late, link) {
		land(late);
		n++;
	}
	pthread_mutex_unlock(&fabric.lock);
	return n;
}

static uint8_t *place(const struct fake_reg *reg, uint64_t address)
{
	return reg->alias ? reg->alias + (address - (uintptr_t)reg->told.address)
			  : (uint8_t *)(uintptr_t)address;
}

void fake_gpu_store(const struct fake_device *device, uint32_t key, uint64_t address,
		    const void *from, uint64_t bytes)
{
	const struct fake_reg *reg = fake_reg_of(key);
	struct late *late;

	if (!reg->alias) {
		memcpy(place(reg, address), from, bytes);
		return;
	}
	late = fake_make(sizeof(*late) + bytes);
	late->device = device;
	late->reg = reg;
	late->file = reg->file;
	late->to = place(reg, address);
	late->bytes = bytes;
	memcpy(late->data, from, bytes);
	pthread_mutex_lock(&fabric.lock);
	list_push_back(&fabric.late, &late->link);
	pthread_mutex_unlock(&fabric.lock);
}

void fake_gpu_load(const struct fake_device *device, uint32_t key, uint64_t address,
		   void *to, uint64_t bytes)
{
	const struct fake_reg *reg = fake_reg_of(key);
	struct late *late;

	pthread_mutex_lock(&fabric.lock);
	list_foreach_safe(late, &fabric.late, link)
		if (late->device == device && reg->alias && late->file == reg->file)
			land(late);
	pthread_mutex_unlock(&fabric.lock);
	memcpy(to, place(reg, address), bytes);
}
