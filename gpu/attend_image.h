/* SPDX-License-Identifier: Apache-2.0 */
/* attend_image: the image that nvcc made of attend.cu, linked into programs that use
 * it. */
#ifndef KVD_GPU_ATTEND_IMAGE_H
#define KVD_GPU_ATTEND_IMAGE_H

#include <stddef.h>

/* A fatbin for devices of compute capability 8.0 and above, as cuModuleLoadData takes it;
 * NULL: built without nvcc. */
const void *attend_image(size_t *bytes_p);

#endif
